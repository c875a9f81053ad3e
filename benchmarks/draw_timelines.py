"""Timelines of a run as one picture: ``python benchmarks/draw_timelines.py RUN OUTPUT.svg``."""

import argparse
from pathlib import Path

import altair as alt

from gradweave.runs import RunFolder
from gradweave.timeline import Timeline

LANES = ["forward", "backward", "communication"]
COLOURS = ["#9ecae1", "#4292c6", "#e6550d"]


def rows(runtime: str, timeline: Timeline) -> list[dict[str, object]]:
    """Messages that wait for those before them are drawn from when these were done."""
    found, free_s = [], 0.0
    for span in timeline.spans:
        start_s = span.start_s
        if span.lane == "communication":
            start_s, free_s = max(start_s, free_s), max(free_s, span.end_s)
        if span.end_s == start_s:
            continue
        found.append(
            {
                "runtime": f"{runtime}: {timeline.iteration_s * 1e3:,.0f} ms",
                "lane": span.lane,
                "start": start_s * 1e3,
                "end": span.end_s * 1e3,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runtime", default="torch-ddp,optimal")
    options = parser.parse_args()
    run = RunFolder(options.run).read()
    values = [
        row for name in options.runtime.split(",") for row in rows(name, run.measured[name][0])
    ]
    chart = (
        alt.Chart(alt.InlineData(values=values))
        .mark_bar(height=20, stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("start:Q", title="ms since the iteration began"),
            x2="end:Q",
            y=alt.Y("lane:N", sort=LANES, title=None),
            color=alt.Color("lane:N", scale=alt.Scale(domain=LANES, range=COLOURS), legend=None),
            row=alt.Row(
                "runtime:N",
                sort=list(dict.fromkeys(str(row["runtime"]) for row in values)),
                title=None,
                header=alt.Header(labelOrient="top", labelAnchor="start", labelFontSize=13),
            ),
        )
        .properties(width=720, height=75)
    )
    chart.save(options.output)


if __name__ == "__main__":
    main()

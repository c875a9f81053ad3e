"""Timelines of a run as one picture: ``python benchmarks/draw_timelines.py RUN OUTPUT.svg``.

It has a background of its own and follows light and dark, because README files are read on both.
"""

import argparse
from html import escape
from pathlib import Path

from gradweave._src.runs import Run, RunFolder
from gradweave._src.timeline import Lane, Timeline

WIDTH, MARGIN = 860, 24
TITLE, LANE, GAP, AXIS = 30, 26, 20, 44  # heights in pixels
NAMES = 118  # the width that names of lanes have
SHORTEST = 0.6  # of a bar, in pixels

LANES: tuple[Lane, ...] = ("forward", "backward", "communication")
TITLES = {"torch-ddp": "torch DDP", "gradweave": "Gradweave, by itself"}

STYLE = """
.card { fill: #ffffff; stroke: #d5dae2 }
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #586173 }
.title { font-size: 15px; font-weight: 600; fill: #171a21 }
.note { font-size: 13px; font-weight: 400; fill: #586173 }
.lane { fill: #f1f3f6 }
.tick { stroke: #d5dae2 }
.forward { fill: #9db4d6 }
.backward { fill: #4f79b8 }
.communication { fill: #e0701c }
.waits { fill: #d3302f; opacity: 0.28 }
@media (prefers-color-scheme: dark) {
  .card { fill: #171b22; stroke: #2f3744 }
  text { fill: #a9b4c4 }
  .title { fill: #e9ecf1 }
  .note { fill: #a9b4c4 }
  .lane { fill: #10141a }
  .tick { stroke: #2f3744 }
  .forward { fill: #5d7398 }
  .backward { fill: #6d9bff }
  .communication { fill: #f0a04b }
  .waits { fill: #ff6b62 }
}
"""


class Scale:
    """The horizontal scale of the picture, from seconds to pixels."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._pixels_per_s = (WIDTH - 2 * MARGIN - NAMES - 40) / longest_s

    def x(self, moment_s: float) -> float:
        return round(MARGIN + NAMES + moment_s * self._pixels_per_s, 2)

    def bar(self, kind: str, start_s: float, end_s: float, top: float, height: float) -> str:
        width = max(SHORTEST, self.x(end_s) - self.x(start_s) - 0.5)
        return (
            f'<rect class="{kind}" x="{self.x(start_s)}" y="{top}" width="{width:.2f}" '
            f'height="{height}" rx="2"/>'
        )


def bars(timeline: Timeline) -> list[tuple[Lane, float, float]]:
    """Return lane, begin and end of each bar.

    Messages that wait for those before them begin when these were done.
    """
    found: list[tuple[Lane, float, float]] = []
    free_s = 0.0
    for span in timeline.spans:
        start_s = span.start_s
        if span.lane == "communication":
            start_s, free_s = max(start_s, free_s), max(free_s, span.end_s)
        if span.end_s > start_s:
            found.append((span.lane, start_s, span.end_s))
    return found


def panel(name: str, timeline: Timeline, top: float, scale: Scale) -> list[str]:
    title = f"{TITLES.get(name, name)}: {timeline.iteration_s * 1e3:,.0f} ms"
    waits = f"{timeline.exposed_s * 1e3:,.0f} ms of it waiting for the network"
    parts = [
        f'<text class="title" x="{MARGIN}" y="{top + 17}">{escape(title)}'
        f'<tspan dx="8" class="note">{waits}</tspan></text>'
    ]
    begin = top + TITLE
    for place, lane in enumerate(LANES):
        y = begin + place * LANE
        parts.append(f'<text x="{MARGIN}" y="{y + 15}">{lane}</text>')
        parts.append(scale.bar("lane", 0.0, scale.longest_s, y, LANE - 6))
    computed_s = max(span.end_s for span in timeline.spans if span.lane == "backward")
    if timeline.iteration_s > computed_s:
        height = len(LANES) * LANE - 6
        parts.append(scale.bar("waits", computed_s, timeline.iteration_s, begin, height))
    parts += [
        scale.bar(lane, start_s, end_s, begin + LANES.index(lane) * LANE, LANE - 6)
        for lane, start_s, end_s in bars(timeline)
    ]
    return parts


def axis(top: float, scale: Scale) -> list[str]:
    step_ms = next(
        step
        for step in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
        if 1e3 * scale.longest_s / step <= 8
    )
    parts = []
    tick_ms = 0
    while tick_ms <= 1e3 * scale.longest_s:
        x = scale.x(tick_ms / 1e3)
        parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{top}" y2="{top + 6}"/>')
        parts.append(f'<text x="{x}" y="{top + 21}" text-anchor="middle">{tick_ms:,} ms</text>')
        tick_ms += step_ms
    return parts


def picture(run: Run, runtimes: list[str]) -> str:
    timelines = {name: run.measured[name][0] for name in runtimes}
    scale = Scale(max(one.iteration_s for one in timelines.values()))
    height_of_panel = TITLE + len(LANES) * LANE + GAP
    height = 2 * MARGIN + len(timelines) * height_of_panel - GAP + AXIS - 14
    parts = [
        part
        for place, (name, timeline) in enumerate(timelines.items())
        for part in panel(name, timeline, MARGIN + place * height_of_panel, scale)
    ]
    parts += axis(MARGIN + len(timelines) * height_of_panel - GAP + 4, scale)
    said = ", ".join(
        f"{TITLES.get(name, name)} {one.iteration_s * 1e3:,.0f} ms"
        for name, one in timelines.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>One iteration: {escape(said)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runtime", default="torch-ddp,gradweave")
    options = parser.parse_args()
    run = RunFolder(options.run).read()
    options.output.write_text(picture(run, options.runtime.split(",")), encoding="utf-8")


if __name__ == "__main__":
    main()

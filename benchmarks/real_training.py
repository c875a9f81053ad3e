"""Real training on emulated clusters: ``python benchmarks/real_training.py OUTPUT``.

Real models on images of Fashion-MNIST under several runtimes, which all take the same steps on the
same batches. Writes OUTPUT.json (every loss), OUTPUT.md and a picture. About ten minutes on two
cores, which also compute here: times tell how runtimes compare, not what a cluster would take.
Runtimes train one after the other, so leave the machine alone meanwhile. ``--only NAME`` trains one
experiment anew and keeps the others of OUTPUT.json (``resnet20-float64`` takes four minutes),
``--again`` writes the page anew and trains nothing.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import altair as alt
import msgspec
from made_with import made_with
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.bench.real_training import RealQuestion, train_for_real
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.planning.bsp import COLLECTIVES, LOOPS
from gradweave._src.results import LossSeries

# When every plan is settled.
LAST_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    title: str
    spec: ClusterSpec
    question: RealQuestion


RESNET20 = RealQuestion(
    runtimes=("torch-ddp", "gradweave", "sharded"),
    model="resnet20-grey",
    least_steps=60,
    batch_size=8,
    # Roundings of float32 switch single rectifiers on or off, and losses depart: one worker alone,
    # whose weights differ by 1e-7, is 1e-2 off after 20 steps, sooner at larger rates.
    learning_rate=0.002,
    steps_when_settled=LAST_STEPS,
)

EXPERIMENTS = [
    Experiment(
        name="resnet20",
        title="ResNet-20 under torch's wrapper and ours, 4 nodes at 1 Gbit/s",
        spec=ClusterSpec(nodes=4, rate="1gbit"),
        question=RESNET20,
    ),
    Experiment(
        name="resnet20-float64",
        title="The same in float64, where roundings are too small to switch a rectifier",
        spec=ClusterSpec(nodes=4, rate="1gbit"),
        question=replace(RESNET20, is_double=True),
    ),
    Experiment(
        name="loops",
        title="Linear Pipeline, Fig. 5: a small CNN under its three loops, 4 nodes at 100 Mbit/s",
        spec=ClusterSpec(nodes=4, rate="100mbit"),
        question=RealQuestion(
            runtimes=(
                "torch-ddp",
                *(f"{loop}:{collective}" for loop in LOOPS for collective in COLLECTIVES),
            ),
            model="small-cnn",
            least_steps=60,
            batch_size=16,
            learning_rate=0.02,
        ),
    ),
]


class Trained(Struct, frozen=True, kw_only=True):
    experiment: str
    made_with: str
    series: list[LossSeries]


def page(found: list[Trained], stem: str) -> str:
    lines = [
        "# Real training on emulated clusters",
        "",
        "Made by `python benchmarks/real_training.py`. All runtimes take the same steps on the "
        "same batches of Fashion-MNIST from the same weights; losses are means over the ranks. "
        "The workers compute on the two cores that also carry their messages. Runtimes train one "
        "after the other. `gradweave` begins in torch's own buckets: where its first ten steps "
        "took longer than torch's did, the machine had other work. The last column says how far "
        "each runtime is from itself, and differences within it say nothing.",
    ]
    for experiment in EXPERIMENTS:
        for one in found:
            if one.experiment == experiment.name:
                lines += ["", f"## {experiment.title}", "", one.made_with, "", *_table(one)]
    return "\n".join([*lines, "", f"![losses over time]({stem}.svg)", ""])


def _table(one: Trained) -> list[str]:
    first = next(series for series in one.series if series.label == "torch-ddp")
    lines = [
        "| runtime | steps | last loss | largest difference from torch-ddp | s in all "
        "| median ms of the last 20 steps | of the first ten | medians of ten steps, least to "
        "most |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for series in one.series:
        steps = min(len(series.losses), len(first.losses))
        apart = max(
            abs(a - b) for a, b in zip(series.losses[:steps], first.losses[:steps], strict=True)
        )
        last_s = series.wall_s[-LAST_STEPS - 1 :]
        step_s = median(after - before for before, after in pairwise(last_s))
        lines.append(
            f"| {series.label} | {len(series.steps)} | {series.losses[-1]:.4f} | {apart:.1e} "
            f"| {series.wall_s[-1]:.1f} | {step_s * 1e3:,.0f} | {_tens(series)} |"
        )
    return lines


def _tens(series: LossSeries) -> str:
    """How far a runtime is from itself: what other work did to the two cores is in it."""
    steps_s = [after - before for before, after in pairwise(series.wall_s)]
    starts = range(0, len(steps_s) - 9, 10)
    tens_ms = [median(steps_s[start : start + 10]) * 1e3 for start in starts]
    return f"{tens_ms[0]:,.0f} | {min(tens_ms):,.0f} to {max(tens_ms):,.0f}"


def draw(found: list[Trained], output: Path) -> None:
    charts = []
    for one in found:
        rows = [
            {"runtime": series.label, "s": wall_s, "loss": loss}
            for series in one.series
            for wall_s, loss in zip(series.wall_s, series.losses, strict=True)
        ]
        charts.append(
            alt.Chart(alt.InlineData(values=rows), title=one.experiment)
            .mark_line(strokeWidth=1)
            .encode(
                x=alt.X("s:Q", title="seconds since training began"),
                y=alt.Y("loss:Q", title="loss, mean over the ranks"),
                color=alt.Color("runtime:N", sort=[series.label for series in one.series]),
            )
            .properties(width=420, height=260)
        )
    chart = alt.hconcat(*charts).resolve_scale(color="independent")
    chart.save(output.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("--only", choices=names, action="append")
    parser.add_argument("--again", action="store_true", help="train nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    known = msgspec.json.decode(raw.read_bytes(), type=list[Trained]) if raw.exists() else []
    for experiment in EXPERIMENTS:
        if options.again or (options.only and experiment.name not in options.only):
            continue
        print(experiment.title, flush=True)
        with Cluster(experiment.spec) as cluster:
            found = train_for_real(cluster, experiment.question).series
        known = [one for one in known if one.experiment != experiment.name]
        series = [found[runtime] for runtime in experiment.question.runtimes]
        known.append(Trained(experiment=experiment.name, made_with=made_with(), series=series))
        raw.write_bytes(msgspec.json.encode(known))
    draw(known, options.output)
    options.output.with_suffix(".md").write_text(page(known, options.output.name))


if __name__ == "__main__":
    main()

"""Real training on emulated clusters: ``python benchmarks/real_training.py OUTPUT``.

Real models on images of Fashion-MNIST under several runtimes, which all train on the same batches,
one after the other, and then some in turns, when all are settled. Writes OUTPUT.json
(every loss), OUTPUT.md and a picture. About ten minutes on two cores, which also compute here:
times tell how runtimes compare, not what a cluster would take; leave the machine alone meanwhile.
``--only NAME`` trains one experiment anew and keeps the others of OUTPUT.json, ``--again`` writes
the page anew and trains nothing.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import altair as alt
import msgspec
from intervals import paired_ratios, with_interval
from made_with import made_with
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.bench.real_training import STEPS_OF_A_TURN, RealQuestion, train_for_real
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
    turns=12,
)

SMALL_CNN = RealQuestion(
    runtimes=(
        "torch-ddp",
        *(f"{loop}:{collective}" for loop in LOOPS for collective in COLLECTIVES),
    ),
    model="small-cnn",
    least_steps=60,
    batch_size=16,
    learning_rate=0.02,
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
        question=SMALL_CNN,
    ),
    Experiment(
        name="loops-float64",
        title="The same in float64, by one of the loops: collectives that add in another order",
        spec=ClusterSpec(nodes=4, rate="100mbit"),
        question=replace(
            SMALL_CNN,
            runtimes=("torch-ddp", *(f"bsp-allreduce:{name}" for name in COLLECTIVES)),
            is_double=True,
        ),
    ),
]


class Trained(Struct, frozen=True, kw_only=True):
    """What came of an experiment."""

    experiment: str
    made_with: str
    series: list[LossSeries]
    settled_s: dict[str, list[float]]  # by runtime, of each turn, or of the last steps alone


def settled_s(series: LossSeries) -> float:
    """Return the median of a training's last steps."""
    ends_s = series.wall_s[-LAST_STEPS - 1 :]
    return median(after - before for before, after in pairwise(ends_s))


def page(found: list[Trained], stem: str) -> str:
    lines = [
        "# Real training on emulated clusters",
        "",
        "Made by `python benchmarks/real_training.py`. All runtimes train on the same batches of "
        "Fashion-MNIST, in the same order and from the same weights; losses are means over the "
        f"ranks. A training takes {RESNET20.least_steps} steps at least. ResNet-20's go on for "
        f"{LAST_STEPS} steps after planning has settled, and those that come later take at least "
        "as many as those before, so numbers of steps, and with them last losses, may differ; "
        "differences of losses are over the steps that both have taken. The workers compute on the "
        "two cores that also carry their messages. When all have "
        f"trained and are settled, they take turns of {STEPS_OF_A_TURN} steps, in an order that "
        "changes; ratios are of turns of the same round, mean and 95 % interval (Student's) over "
        "the rounds. "
        "Losses and the last two columns are of the trainings before; the last one says how far a "
        "runtime is from itself, and differences within it say nothing. Where there are no turns, "
        f"times are of the last {LAST_STEPS} steps of these trainings.",
    ]
    for experiment in EXPERIMENTS:
        for one in found:
            if one.experiment == experiment.name:
                lines += ["", f"## {experiment.title}", "", one.made_with, "", *_table(one)]
    return "\n".join([*lines, "", f"![losses over time]({stem}.svg)", ""])


def _table(one: Trained) -> list[str]:
    first = next(series for series in one.series if series.label == "torch-ddp")
    lines = [
        "| runtime | steps | last loss | largest difference from torch-ddp | turns "
        "| ms of a step | its time over torch-ddp's | of the first ten "
        "| medians of ten steps, least to most |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for series in one.series:
        steps = min(len(series.losses), len(first.losses))
        apart = max(
            abs(a - b) for a, b in zip(series.losses[:steps], first.losses[:steps], strict=True)
        )
        steps_s, torchs_s = one.settled_s[series.label], one.settled_s[first.label]
        lines.append(
            f"| {series.label} | {len(series.steps)} | {series.losses[-1]:.4f} | {apart:.1e} "
            f"| {len(steps_s) if len(steps_s) > 1 else ''} | {median(steps_s) * 1e3:,.0f} "
            f"| {with_interval(paired_ratios(steps_s, torchs_s))} | {_tens(series)} |"
        )
    return lines


def _tens(series: LossSeries) -> str:
    """Return how medians of ten steps of one runtime differ, as other work disturbs them."""
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


def trained(experiment: Experiment) -> Trained:
    with Cluster(experiment.spec) as cluster:
        training = train_for_real(cluster, experiment.question)
    alone_s = {name: [settled_s(series)] for name, series in training.series.items()}
    return Trained(
        experiment=experiment.name,
        made_with=made_with(),
        series=[training.series[runtime] for runtime in experiment.question.runtimes],
        settled_s=training.turns_s or alone_s,
    )


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
        known = [one for one in known if one.experiment != experiment.name]
        known.append(trained(experiment))
        raw.write_bytes(msgspec.json.encode(known))
    draw(known, options.output)
    options.output.with_suffix(".md").write_text(page(known, options.output.name))


if __name__ == "__main__":
    main()

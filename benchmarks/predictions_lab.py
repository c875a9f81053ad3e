"""Predictions beside what the lab measures: ``python benchmarks/predictions_lab.py OUT``.

Fifty and more configurations: traces, nodes, rates, runtimes. For each cluster and trace messages
are calibrated beside the replayed job, which is recorded there, too; predictions are written to
--runs before anything trains. OUT.json keeps what was measured; what is in it already is not
measured again, so a run that was interrupted goes on (``--afresh`` begins anew). About 25 minutes
on two cores; leave the machine alone meanwhile. ``--page docs`` measures nothing, and writes
predictions-lab.md and its picture into that folder from OUT.json.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import altair as alt
import msgspec
import numpy as np
from made_with import made_with
from msgspec import Struct

from gradweave import Network, Trace, load_trace
from gradweave._src import files
from gradweave._src.bench.calibration import (
    CalibrationQuestion,
    RecordedJob,
    ReplayedJob,
    calibrate_for_job,
)
from gradweave._src.bench.training import Settings, compressions_of, to_measure, train_on_cluster
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.planning import make_plan
from gradweave._src.report.pricing import price_of
from gradweave._src.results import Result
from gradweave._src.runs import RunFolder
from gradweave._src.simulation import simulate
from gradweave._src.vocabulary import MIB, ReplayMode
from papers import charts
from papers.page import paragraph, table

PICTURE = "predictions-lab.svg"
MODE: ReplayMode = "waiting"
FORWARD_S, BACKWARD_S = 0.1, 0.2
WARMUP, ITERATIONS, REPEATS = 2, 4, 2
CALIBRATED = 3  # times each size
# Where another number of nodes is predicted from, and by which planner these runtimes merge.
EXTRAPOLATED_FROM = 2
MERGED_BY: Mapping[str, str] = {
    "torch-ddp": "ddp",
    "single": "single",
    "mgwfbp": "mgwfbp",
    "optimal": "optimal",
}
MERGED = frozenset(MERGED_BY)
ALL = (*MERGED_BY, "wfbp", "sharded", "bf16", "gtopk:0.01")
FEW = (*MERGED_BY, "wfbp", "sharded")


class Setting(NamedTuple):
    """One cluster and one trace, under several runtimes: so many configurations."""

    nodes: int
    rate: str
    trace: str
    scale: float
    runtimes: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.trace} at {self.scale:g}, {self.nodes} nodes at {self.rate}"

    def replayed(self) -> Trace:
        return load_trace(self.trace).rescaled(
            forward_s=FORWARD_S, backward_s=BACKWARD_S, parameter_scale=self.scale
        )


SETTINGS = (
    Setting(2, "1gbit", "resnet50", 0.125, ALL),
    Setting(2, "1gbit", "googlenet-k80", 0.125, FEW),
    Setting(4, "1gbit", "resnet50", 0.125, ALL),
    Setting(4, "1gbit", "googlenet-k80", 0.125, FEW),
    Setting(4, "1gbit", "densenet201", 0.15, (*MERGED_BY, "sharded", "gtopk:0.01")),
    Setting(4, "200mbit", "vgg16", 0.05, ALL),
    Setting(3, "500mbit", "alexnet", 0.05, ALL),
    Setting(8, "1gbit", "resnet50", 0.125, (*MERGED_BY, "wfbp", "sharded", "gtopk:0.01")),
    Setting(8, "500mbit", "googlenet-k80", 0.125, FEW),
)


class Measured(Struct, frozen=True, kw_only=True):
    nodes: int
    rate: str
    trace: str
    scale: float
    made_with: str
    compute_s: float  # as recorded, where nothing was sent
    copy_s_per_byte: float
    extrapolated_s: dict[str, float]  # by runtime, from the calibration of two nodes
    results: list[Result]


class Everything(Struct, frozen=True, kw_only=True):
    measured: list[Measured]


def measure(setting: Setting, runs: Path, cores: int) -> Measured:
    folder = runs / f"{setting.trace}-{setting.nodes}-{setting.rate}"
    folder.mkdir(parents=True, exist_ok=True)
    trace = setting.replayed()
    with Cluster(ClusterSpec(nodes=setting.nodes, rate=setting.rate)) as cluster:
        network, recorded = calibrate_for_job(cluster, _question(setting, trace))
        files.write(folder / "calibrated.json", network)
        (folder / "recorded.json").write_bytes(msgspec.json.encode(recorded))
        from_two_s = extrapolated_s(setting, runs, cores)
        (folder / "extrapolated.json").write_bytes(msgspec.json.encode(from_two_s))
        results = train_on_cluster(
            cluster,
            trace,
            network,
            Settings(
                runtimes=setting.runtimes,
                mode=MODE,
                warmup=WARMUP,
                iterations=ITERATIONS,
                repeats=REPEATS,
                with_timelines=False,
            ),
            folder=RunFolder(folder / "run"),
            command="benchmarks/predictions_lab.py",
            recorded=recorded,
        )
    return Measured(
        nodes=setting.nodes,
        rate=setting.rate,
        trace=setting.trace,
        scale=setting.scale,
        made_with=made_with(),
        compute_s=recorded.trace.compute_s,
        copy_s_per_byte=recorded.copy_s_per_byte,
        extrapolated_s=from_two_s,
        results=results,
    )


def _question(setting: Setting, trace: Trace) -> CalibrationQuestion:
    return CalibrationQuestion(
        name=setting.title,
        ways=to_measure(setting.runtimes),
        largest_bytes=max(MIB, int(trace.nbytes.sum())),
        repeats=CALIBRATED,
        compressions=compressions_of(setting.runtimes),
        job=ReplayedJob(trace=trace, mode=MODE),
    )


def extrapolated_s(setting: Setting, runs: Path, cores: int) -> dict[str, float]:
    """Predict more nodes from what was measured on two, by a ring's formula.

    Start-ups and bytes scale as the formula has them. Nodes of the lab share cores, so that
    whatever a core does takes longer among more of them.
    """
    before = runs / f"{setting.trace}-{EXTRAPOLATED_FROM}-{setting.rate}"
    if setting.nodes == EXTRAPOLATED_FROM or not (before / "calibrated.json").exists():
        return {}
    known = files.read(before / "calibrated.json", Network)
    job = msgspec.json.decode((before / "recorded.json").read_bytes(), type=RecordedJob)
    crowding = max(1.0, setting.nodes / cores) / max(1.0, EXTRAPOLATED_FROM / cores)
    price = price_of(known, EXTRAPOLATED_FROM).among(setting.nodes, startups=crowding)
    network = price.network("extrapolated")
    return {
        runtime: simulate(
            job.trace,
            make_plan(job.trace, network, workers=setting.nodes, planner=MERGED_BY[runtime]),
            network,
            workers=setting.nodes,
            copy_s_per_byte=job.copy_s_per_byte * crowding,
        ).iteration_s
        for runtime in setting.runtimes
        if runtime in MERGED_BY
    }


def page(everything: Everything) -> str:
    rows = [(one, row) for one in everything.measured for row in one.results]
    blocks = [
        "# Predictions beside what the lab measures",
        "Made by `python benchmarks/predictions_lab.py OUT` and, from what that has measured, "
        "`python benchmarks/predictions_lab.py OUT --page docs`.",
        f"Measured with: {_versions(everything)}",
        paragraph(f"""
            {len(rows)} configurations on emulated clusters, each predicted before it ran. A job is
            a replayed trace: forward {FORWARD_S:g} s, backward {BACKWARD_S:g} s, its parameters
            scaled; a host waits for its emulated accelerator, and all nodes of a cluster share
            this machine's cores. For each cluster and trace the job is recorded where it will run,
            and messages are timed beside it; plans and predictions know that and nothing else, and
            are on the disk before anything trains. What is measured is the median of {REPEATS}
            repeats' medians of {ITERATIONS} iterations, of the slowest rank, too few for an
            interval. What the model knows is in
            [measuring.md](measuring.md#what-a-prediction-knows)."""),
        "The error is predicted over measured time, less one: negative where the prediction is too "
        "fast.",
        "## The errors",
        table(
            [
                "",
                "configurations",
                "mean",
                "mean of absolute errors",
                "95th percentile of absolute errors",
                "largest",
                "within 15 %",
            ],
            [_spread(title, errors) for title, errors in _groups(rows) if errors],
        ),
        f"![errors of all predictions, by runtime](images/{PICTURE})",
        paragraph("""
            What is left of them: `wfbp` is predicted too slow, probably because its messages are of
            many sizes and gloo carries two at a time. A stream of equal messages on 8 nodes took 15
            to 18 ms a message, whether 16 or 160 of them, handed over quickly or slowly, waited for
            in order or all at once; those of training, a large one beside small ones, took 14.
            `sharded` is predicted too fast where nodes share cores, by its ring on Python's
            threads; how much threads of eight processes take from each other beyond what is timed
            beside the job is not explained."""),
        "## Other numbers of nodes",
        paragraph(f"""
            Calibrated and recorded on {EXTRAPOLATED_FROM} nodes, predicted for more: start-ups and
            bytes are scaled as a ring's formula scales them, and what takes a core's time by how
            many nodes share one. The plans are the ones that such a network asks for, which may
            be others than those that ran."""),
        table(
            ["trace", "nodes", "rate", "runtime", "measured ms", "predicted ms", "error"],
            list(_extrapolated_rows(everything)),
        ),
        "## One by one",
    ]
    blocks += [block for one in everything.measured for block in _section(one)]
    return "\n\n".join(blocks) + "\n"


def _versions(everything: Everything) -> str:
    return " ".join(dict.fromkeys(one.made_with for one in everything.measured))


def _groups(rows: Sequence[tuple[Measured, Result]]) -> Iterator[tuple[str, list[float]]]:
    def of(chosen: Callable[[Measured, Result], bool]) -> list[float]:
        return [_error(row) for one, row in rows if chosen(one, row)]

    yield "**all**", of(lambda _, row: bool(row))
    yield "merged plans, dense", of(lambda _, row: row.runtime in MERGED)
    yield "one message for each gradient", of(lambda _, row: row.runtime == "wfbp")
    yield "both passes (`sharded`, ring)", of(lambda _, row: row.runtime == "sharded")
    yield "rounded (`bf16`, ring)", of(lambda _, row: row.runtime == "bf16")
    yield "sparse (`gtopk`)", of(lambda _, row: row.runtime.startswith("gtopk"))
    for nodes in sorted({one.nodes for one, _ in rows}):
        yield f"{nodes} nodes", [_error(row) for one, row in rows if one.nodes == nodes]
    pairs = [
        one.extrapolated_s[row.runtime] / row.iteration_s - 1
        for one, row in rows
        if row.runtime in one.extrapolated_s
    ]
    yield f"from {EXTRAPOLATED_FROM} nodes to more, merged", pairs


def _error(row: Result) -> float:
    assert row.predicted_s is not None
    return row.predicted_s / row.iteration_s - 1


def _spread(title: str, errors: Sequence[float]) -> list[str]:
    sizes = [abs(error) for error in errors]
    return [
        title,
        str(len(errors)),
        f"{mean(errors):+.1%}",
        f"{mean(sizes):.1%}",
        f"{float(np.quantile(sizes, 0.95)):.1%}",
        f"{max(sizes):.1%}",
        f"{sum(size <= 0.15 for size in sizes)} of {len(sizes)}",
    ]


def _extrapolated_rows(everything: Everything) -> Iterator[list[str]]:
    for one in everything.measured:
        for row in one.results:
            if row.runtime in one.extrapolated_s:
                predicted_s = one.extrapolated_s[row.runtime]
                yield [
                    one.trace,
                    str(one.nodes),
                    one.rate,
                    f"`{row.runtime}`",
                    f"{1e3 * row.iteration_s:.0f}",
                    f"{1e3 * predicted_s:.0f}",
                    f"{predicted_s / row.iteration_s - 1:+.1%}",
                ]


def _section(one: Measured) -> Iterator[str]:
    computed_s = median(row.compute_s for row in one.results if row.compute_s is not None)
    yield f"### {one.trace} at {one.scale:g} of its parameters, {one.nodes} nodes at {one.rate}"
    yield paragraph(f"""
        Computing alone {1e3 * one.compute_s:.0f} ms as recorded, {1e3 * computed_s:.0f} ms
        beside the runtimes; a byte is copied in {1e9 * one.copy_s_per_byte:.2f} ns.""")
    yield table(
        ["runtime", "messages", "measured ms", "predicted ms", "error", "correct"],
        [
            [
                f"`{row.runtime}`",
                str(row.messages),
                f"{1e3 * row.iteration_s:.0f}",
                f"{1e3 * (row.predicted_s or 0.0):.0f}",
                f"{_error(row):+.1%}",
                "yes" if row.correct else "NO",
            ]
            for row in one.results
        ],
    )


def chart(everything: Everything) -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {"runtime": row.runtime, "error": _error(row), "nodes": f"{one.nodes} nodes"}
        for one in everything.measured
        for row in one.results
    ]
    drawn = (
        charts.data_chart(rows)
        .mark_circle(size=48, opacity=0.75)
        .encode(
            x=alt.X("error:Q", axis=alt.Axis(format="%", title="error of the predicted time")),
            y=alt.Y("runtime:N", title=None, sort=list(ALL)),
            color=alt.Color("nodes:N", legend=alt.Legend(title=None)),
        )
        .properties(width=520, height=220)
    )
    return charts.finished(drawn, "How far predictions are off on emulated clusters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="OUT.json is read and written")
    parser.add_argument("--runs", type=Path, default=Path("runs/predictions-lab"))
    parser.add_argument("--afresh", action="store_true", help="measure again what is in OUT.json")
    parser.add_argument("--only", help="of this trace alone")
    parser.add_argument("--nodes", type=int, help="on so many nodes alone")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that nodes share")
    parser.add_argument("--page", type=Path, metavar="DOCS", help="write the page, measure nothing")
    options = parser.parse_args()
    file = options.output.with_suffix(".json")
    kept = Everything(measured=[])
    if file.exists() and not options.afresh:
        kept = msgspec.json.decode(file.read_bytes(), type=Everything)
    if options.page is not None:
        (options.page / "predictions-lab.md").write_text(page(kept))
        (options.page / "images").mkdir(exist_ok=True)
        chart(kept).save(str(options.page / "images" / PICTURE))
        return
    known = {(one.nodes, one.rate, one.trace, one.scale) for one in kept.measured}
    for setting in SETTINGS:
        is_asked = options.only in {None, setting.trace} and options.nodes in {None, setting.nodes}
        if setting[:4] in known or not is_asked:
            continue
        print(setting.title, flush=True)
        try:
            measured = measure(setting, options.runs, options.cores)
        except LabError as error:  # the next time it is tried again
            print(f"  {error}", flush=True)
            continue
        kept.measured.append(measured)
        for row in measured.results:
            print(f"  {row.runtime}: {_error(row):+.1%}", flush=True)
        files.write_text(file, msgspec.json.format(msgspec.json.encode(kept)).decode() + "\n")


if __name__ == "__main__":
    main()

"""Training speed on emulated clusters: ``python benchmarks/training.py OUTPUT``.

Replayed traces under several runtimes, predicted before and measured. Writes OUTPUT.json (every
result), OUTPUT.md (tables) and a picture. About two hours on two cores; leave the machine alone
meanwhile. ``--only NAME`` runs one experiment and keeps the others of OUTPUT.json, ``--again``
writes the page anew from it. Run folders with timelines go to --runs; the network of one of them
can be given with --network instead of being calibrated.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import altair as alt
import msgspec
from experiments import EXPERIMENTS, PAPERS, Experiment
from intervals import paired_ratios, with_interval
from made_with import made_with
from msgspec import Struct

from gradweave import Network, Trace, load_trace
from gradweave._src import files
from gradweave._src.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave._src.bench.training import (
    Settings,
    compressions_of,
    needs_slow_ways,
    to_measure,
    train_on_cluster,
)
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.planning.bsp import find_loop
from gradweave._src.results import Result
from gradweave._src.runs import RunFolder


class Measured(Struct, frozen=True, kw_only=True):
    experiment: str
    parameter_scale: float
    selection_s: float | None = None  # of the model's largest gradients, where they are selected
    calibrated_before: bool = False  # the network was given
    made_with: str
    results: list[Result]


class Everything(Struct, frozen=True, kw_only=True):
    measured: list[Measured]


def measure(experiment: Experiment, runs: Path, known: Network | None) -> Iterator[Measured]:
    if known is not None and len(experiment.clusters) > 1:
        raise SystemExit(f"{experiment.name} has several clusters; calibrate them")
    for nodes, rate, ranks_per_node in experiment.clusters:
        spec = ClusterSpec(nodes=nodes, rate=rate, ranks_per_node=ranks_per_node)
        with Cluster(spec) as cluster:
            network = known or _calibrated(cluster, experiment)
            for name, scale in experiment.traces:
                print(f"{experiment.name}: {name}, {spec}", flush=True)
                trace = _trace(experiment, name, scale)
                elements = sum(tensor.elements for tensor in trace.tensors)
                yield Measured(
                    experiment=experiment.name,
                    parameter_scale=scale,
                    selection_s=elements * network.selection_s_per_element or None,
                    calibrated_before=known is not None,
                    made_with=made_with(),
                    results=_trained(experiment, cluster, network, trace, runs),
                )


def _trace(experiment: Experiment, name: str, scale: float) -> Trace:
    return load_trace(name).rescaled(
        forward_s=experiment.forward_s, backward_s=experiment.backward_s, parameter_scale=scale
    )


def _calibrated(cluster: Cluster, experiment: Experiment) -> Network:
    """Calibrate a cluster, once for every trace that runs on it."""
    question = CalibrationQuestion(
        name=f"{cluster.spec.nodes} nodes at {cluster.spec.rate}",
        ways=to_measure(experiment.runtimes),
        largest_bytes=experiment.largest_bytes,
        repeats=experiment.calibrated,
        compressions=compressions_of(experiment.runtimes),
        keeps_slow=needs_slow_ways(experiment.runtimes),
    )
    return calibrate_cluster(cluster, question).beside_nothing()


def _trained(
    experiment: Experiment, cluster: Cluster, network: Network, trace: Trace, runs: Path
) -> list[Result]:
    return train_on_cluster(
        cluster,
        trace,
        network,
        Settings(
            runtimes=experiment.runtimes,
            mode="waiting",
            warmup=2,
            iterations=experiment.iterations,
            repeats=experiment.repeats,
            with_timelines=experiment.with_timelines,
        ),
        folder=RunFolder(runs / f"{experiment.name}-{trace.name}-{cluster.spec.nodes}"),
        command=f"benchmarks/training.py --only {experiment.name}",
    )


def known(value: float | None) -> float:
    """Return a number that every benchmark knows, though a training may not."""
    assert value is not None
    return value


def page(everything: Everything, stem: str) -> str:
    lines = [
        "# Training speed on emulated clusters",
        "",
        "Made by `python benchmarks/training.py`. Times are of the slowest rank, medians over "
        "repeats of medians over iterations; what each column means is in docs/measuring.md. "
        "Predictions come from one calibration per cluster and were written before the runtimes "
        "ran. A ratio is of two times in the same repeat: mean and 95 % interval (Student's) over "
        "the repeats.",
    ]
    for experiment in EXPERIMENTS:
        found = [one for one in everything.measured if one.experiment == experiment.name]
        if found:
            lines += ["", f"## {experiment.title}", "", _settings(experiment, found), ""]
            lines += [*dict.fromkeys(one.made_with for one in found), ""]
            if experiment.ratios:
                lines += _compared(experiment, found)
            elif experiment.name in {"sparse", "sparse-resnets"}:
                lines += [*_table(found), "", *_shares(found)]
            elif experiment.name == "loops":
                lines += _loops(found)
            elif experiment.name == "tiers":
                lines += _images(found)
            else:
                lines += _table(found)
            if experiment.name == "scaling":
                lines += ["", f"![speed-up over nodes]({stem}_scaling.svg)"]
    return "\n".join(lines) + "\n"


def _settings(experiment: Experiment, found: list[Measured]) -> str:
    before = any(one.calibrated_before for one in found)
    return (
        f"Forward {experiment.forward_s:g} s, backward {experiment.backward_s:g} s; "
        f"{experiment.repeats} repeats of {experiment.iterations} iterations, taking turns."
        f"{' The network was calibrated in an earlier run.' if before else ''}"
    )


def _table(found: list[Measured]) -> list[str]:
    lines = [
        "| trace | scale | nodes | runtime | messages | measured ms | predicted ms | error "
        "| exposed ms | efficiency | its time over torch-ddp's |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        first = next(row for row in one.results if row.runtime == "torch-ddp")
        for row in one.results:
            cap = "" if row.bucket_cap_mb is None else f" ({row.bucket_cap_mb:g} MiB)"
            lines.append(
                f"| {row.trace} | {one.parameter_scale:g} | {row.nodes} | {row.runtime}{cap} "
                f"| {row.messages} | {row.iteration_s * 1e3:,.0f} "
                f"| {known(row.predicted_s) * 1e3:,.0f} | {known(row.prediction_error):+.1%} "
                f"| {known(row.exposed_s) * 1e3:,.0f} "
                f"| {known(row.compute_s) / row.iteration_s:.1%} | {_ratio(row, first)} |"
            )
    return lines


def _compared(experiment: Experiment, found: list[Measured]) -> list[str]:
    """Put runtimes side by side, with how much longer one takes, as mean over the repeats."""
    ratios = experiment.ratios
    lines = [
        f"Milliseconds, and in brackets messages.{experiment.note}",
        "",
        f"| trace | scale | nodes | {' | '.join(experiment.runtimes)} "
        f"| {' | '.join(f'{ours} / {other}' for ours, other in ratios)} |",
        f"|---|---:|---:|{'---:|' * (len(experiment.runtimes) + len(ratios))}",
    ]
    for one in found:
        rows = {row.runtime: row for row in one.results}
        times = (
            f"{rows[name].iteration_s * 1e3:,.0f} ({rows[name].messages})"
            for name in experiment.runtimes
        )
        compared = (_ratio(rows[ours], rows[other]) for ours, other in ratios)
        first = one.results[0]
        lines.append(
            f"| {first.trace} | {one.parameter_scale:g} | {first.nodes} "
            f"| {' | '.join((*times, *compared))} |"
        )
    return lines


def _shares(found: list[Measured]) -> list[str]:
    """Tell where the time of an iteration goes, without what is hidden behind compute."""
    lines = [
        "Where an iteration's time goes: computing, selecting (as calibrated, where it is not "
        "hidden behind computing), and communication that is not hidden.",
        "",
        "| trace | nodes | runtime | compute ms | selection ms | exposed communication ms |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for one in found:
        for row in one.results:
            is_sparse = "topk" in row.runtime and one.selection_s is not None
            selection_s = min(one.selection_s or 0.0, known(row.exposed_s)) if is_sparse else 0.0
            lines.append(
                f"| {row.trace} | {row.nodes} | {row.runtime} | {known(row.compute_s) * 1e3:,.0f} "
                f"| {selection_s * 1e3:,.0f} | {(known(row.exposed_s) - selection_s) * 1e3:,.0f} |"
            )
    return lines


def _loops(found: list[Measured]) -> list[str]:
    """Write the Linear Pipeline paper's Table 2, with what was measured here."""
    lines = [
        "Communication is what backward and forward do not hide.",
        "",
        "| trace | scale | loop | collective | iteration ms | predicted ms | computation ms "
        "| communication ms | share of communication |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        for row in one.results:
            loop = find_loop(row.runtime)
            lines.append(
                f"| {row.trace} | {one.parameter_scale:g} | {loop.name} | {loop.collective} "
                f"| {row.iteration_s * 1e3:,.0f} | {known(row.predicted_s) * 1e3:,.0f} "
                f"| {known(row.compute_s) * 1e3:,.0f} | {known(row.exposed_s) * 1e3:,.0f} "
                f"| {known(row.exposed_s) / row.iteration_s:.0%} |"
            )
    return lines


IMAGES_PER_RANK = 32  # that one iteration of the BlueConnect paper's ResNet-50 has


def _images(found: list[Measured]) -> list[str]:
    """Write BlueConnect's Fig. 6 as a table: images per second, by each collective."""
    lines = [
        f"{IMAGES_PER_RANK} images on each rank, as in the paper; `any` chooses the collective of "
        "each message by what was calibrated.",
        "",
        "| trace | scale | nodes x ranks | runtime | messages | measured ms | predicted ms | error "
        "| images/s | its time over ring's |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        ring = next(row for row in one.results if row.runtime == "optimal@ring")
        lines += [
            f"| {row.trace} | {one.parameter_scale:g} | {row.nodes} x {row.ranks_per_node} "
            f"| {row.runtime} | {row.messages} | {row.iteration_s * 1e3:,.0f} "
            f"| {known(row.predicted_s) * 1e3:,.0f} | {known(row.prediction_error):+.1%} "
            f"| {row.workers * IMAGES_PER_RANK / row.iteration_s:,.0f} "
            f"| {_ratio(row, ring)} |"
            for row in one.results
        ]
    return lines


def _ratio(ours: Result, other: Result) -> str:
    return with_interval(paired_ratios(ours.repeats_s, other.repeats_s))


def draw(everything: Everything, output: Path) -> None:
    rows = [
        {
            "trace": row.trace,
            "nodes": row.nodes,
            "runtime": row.runtime,
            "speed-up": row.workers * known(row.compute_s) / row.iteration_s,
            "exposed ms": known(row.exposed_s) * 1e3,
        }
        for one in everything.measured
        if one.experiment == "scaling"
        for row in one.results
    ]
    if not rows:
        return
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("nodes:O"), color=alt.Color("runtime:N", sort=list(PAPERS))
    )
    speedup = base.mark_line(point=True).encode(
        y=alt.Y("speed-up:Q", title="speed-up over one worker")
    )
    exposed = base.mark_bar().encode(
        xOffset=alt.XOffset("runtime:N", sort=list(PAPERS)),
        y=alt.Y("exposed ms:Q", title="exposed communication, ms"),
    )
    charts = [
        alt.hconcat(
            *(
                chart.transform_filter(alt.datum.trace == trace).properties(
                    width=260, height=200, title=trace
                )
                for chart in (speedup, exposed)
            )
        )
        for trace in dict.fromkeys(row["trace"] for row in rows)
    ]
    alt.vconcat(*charts).save(output.with_name(f"{output.name}_scaling.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("--only", choices=names, action="append")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--network", type=Path, help="calibrated before")
    options = parser.parse_args()
    if options.network and len(options.only or ()) != 1:
        parser.error("--network is of one cluster; choose one experiment with --only")
    network = options.network and files.read(options.network, Network)
    raw = options.output.with_suffix(".json")
    for experiment in EXPERIMENTS:
        if options.again or (options.only and experiment.name not in options.only):
            continue
        others = [one for one in _known(raw).measured if one.experiment != experiment.name]
        for one in measure(experiment, options.runs, network):
            others.append(one)  # kept after each, for a run may be interrupted
            everything = Everything(measured=others)
            raw.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1))
    draw(_known(raw), options.output)
    options.output.with_suffix(".md").write_text(page(_known(raw), options.output.name))


def _known(raw: Path) -> Everything:
    if not raw.exists():
        return Everything(measured=[])
    return msgspec.json.decode(raw.read_bytes(), type=Everything)


if __name__ == "__main__":
    main()

"""Collectives on emulated clusters, beside gloo's own: ``python benchmarks/collectives.py OUTPUT``.

Writes OUTPUT.json (every timing), OUTPUT.md (tables of ratios) and two pictures. About twenty-five
minutes on two cores; leave the machine alone meanwhile. ``--only NAME`` runs one experiment and
keeps the others of OUTPUT.json, ``--again`` writes page and pictures anew from it.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import altair as alt
import msgspec
from made_with import made_with
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.bench.collectives import time_on_cluster
from gradweave._src.collectives import build
from gradweave._src.collectives.topology import topology_of
from gradweave._src.costs import GIGABIT_ETHERNET, Link
from gradweave._src.lab import ClusterSpec, SentBytes
from gradweave._src.measure.timings import Question, Timing
from gradweave._src.simulation.schedule import bytes_across_tier
from gradweave._src.vocabulary import Operation, parse_rate

ROOTED: tuple[Operation, ...] = ("broadcast", "reduce", "all-reduce")
OF_THE_PAPER = ("native", "linear-pipeline", "mst", "exchange")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    title: str
    clusters: tuple[ClusterSpec, ...]
    operations: tuple[Operation, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    repeats: int = 7


def cluster(nodes: int, ranks_per_node: int = 1, *, rate: str, **more: object) -> ClusterSpec:
    return msgspec.convert(
        {"nodes": nodes, "ranks_per_node": ranks_per_node, "rate": rate, **more}, ClusterSpec
    )


EXPERIMENTS = [
    Experiment(
        name="sizes",
        title="Linear Pipeline paper, Fig. 3: 4 nodes, 1 Gbit/s, over message size",
        clusters=(cluster(4, rate="1gbit"),),
        operations=ROOTED,
        algorithms=OF_THE_PAPER,
        sizes=(64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 32_000_000, 64_000_000),
    ),
    Experiment(
        name="nodes",
        title="Linear Pipeline paper, Fig. 4: 8 MB, 200 Mbit/s, over nodes",
        clusters=tuple(cluster(nodes, rate="200mbit") for nodes in range(2, 9)),
        operations=ROOTED,
        algorithms=OF_THE_PAPER,
        sizes=(8_000_000,),
        repeats=5,
    ),
    Experiment(
        name="ring",
        title="Ring against gloo's all-reduce: 4 nodes, 1 Gbit/s",
        clusters=(cluster(4, rate="1gbit"),),
        operations=("all-reduce",),
        algorithms=("native", "ring", "halving-doubling", "double-tree", "parameter-server:4"),
        sizes=(1_000_000, 4_000_000, 32_000_000),
        repeats=11,
    ),
    Experiment(
        name="small",
        title="Small messages: 8 nodes, 1 Gbit/s",
        clusters=(cluster(8, rate="1gbit"),),
        operations=("all-reduce",),
        algorithms=("native", "recursive-doubling", "binary-tree", "mst", "halving-doubling"),
        sizes=(1_000, 4_000, 16_000),
        repeats=11,
    ),
    Experiment(
        name="blueconnect",
        title="BlueConnect: 8 MB, 200 Mbit/s between nodes",
        clusters=(
            cluster(2, 4, rate="200mbit"),
            cluster(2, 4, rate="200mbit", local_rate="1gbit"),
            cluster(4, 2, rate="200mbit"),
            cluster(4, 2, rate="400mbit", racks=2, uplink_rate="200mbit"),
        ),
        operations=("all-reduce",),
        algorithms=("native", "ring", "two-level", "blueconnect", "blueconnect:auto"),
        sizes=(8_000_000,),
        repeats=9,
    ),
]


class Everything(Struct, frozen=True, kw_only=True):
    """What one run of this program measured, and with what."""

    timings: list["Measured"]
    uplinks: list["Uplinks"]


class Measured(Struct, frozen=True, kw_only=True):
    """The timings of one experiment on one cluster."""

    experiment: str
    cluster: ClusterSpec
    timings: list[Timing]
    made_with: str


def measure(experiment: Experiment) -> Iterable[Measured]:
    for spec in experiment.clusters:
        print(f"{experiment.name}: {_described(spec)}", file=sys.stderr, flush=True)
        question = Question(
            operations=experiment.operations,
            algorithms=experiment.algorithms,
            sizes=experiment.sizes,
            repeats=experiment.repeats,
            link=_expected_link(spec),
            nodes_per_rack=_nodes_per_rack(spec),
        )
        yield Measured(
            experiment=experiment.name,
            made_with=made_with(),
            cluster=spec,
            timings=time_on_cluster(spec, question).timings,
        )


def _expected_link(spec: ClusterSpec) -> Link:
    return replace(GIGABIT_ETHERNET, s_per_byte=8 / parse_rate(spec.rate or "1gbit"))


def _nodes_per_rack(spec: ClusterSpec) -> int | None:
    return spec.nodes // spec.racks if spec.racks > 1 else None


UPLINK_CLUSTERS = (
    cluster(2, 4, rate="200mbit"),
    cluster(4, 2, rate="200mbit"),
    cluster(4, 2, rate="400mbit", racks=2, uplink_rate="200mbit"),
)
UPLINK_BYTES = 8_000_000


class Uplinks(Struct, frozen=True, kw_only=True):
    """Bytes that leave each node, and each rack, in one all-reduce: counted, and by schedule."""

    cluster: ClusterSpec
    algorithm: str
    made_with: str
    counted_by_node: float
    expected_by_node: int
    counted_by_rack: float | None
    expected_by_rack: int | None


def count_uplinks() -> Iterable[Uplinks]:
    for spec, algorithm in product(UPLINK_CLUSTERS, ("ring", "two-level", "blueconnect")):
        print(f"uplinks: {_described(spec)}, {algorithm}", file=sys.stderr, flush=True)
        few, many = 2, 6
        before, after = (_sent(spec, algorithm, repeats=repeats) for repeats in (few, many))
        more = after.since(before)  # connecting and checking cost the same in both
        calls = many - few
        by_node, by_rack = _expected_bytes(spec, algorithm)
        yield Uplinks(
            cluster=spec,
            algorithm=algorithm,
            made_with=made_with(),
            counted_by_node=max(more.by_node) / calls,
            expected_by_node=by_node,
            counted_by_rack=max(more.by_rack) / calls if more.by_rack else None,
            expected_by_rack=by_rack,
        )


def _sent(spec: ClusterSpec, algorithm: str, *, repeats: int) -> SentBytes:
    question = Question(
        operations=("all-reduce",),
        algorithms=(algorithm,),
        sizes=(UPLINK_BYTES,),
        repeats=repeats,
        link=_expected_link(spec),
        nodes_per_rack=_nodes_per_rack(spec),
    )
    sent = time_on_cluster(spec, question).sent
    assert sent is not None
    return sent


def _expected_bytes(spec: ClusterSpec, algorithm: str) -> tuple[int, int | None]:
    nodes = [spec.node_of(rank) for rank in range(spec.world_size)]
    racks = [spec.rack_of(node) for node in nodes]
    schedule = build(
        "all-reduce",
        algorithm,
        topology=topology_of(nodes, racks),
        nbytes=UPLINK_BYTES,
        link=_expected_link(spec),
    )
    by_node = bytes_across_tier(schedule, spec.ranks_per_node, nbytes=UPLINK_BYTES)
    if spec.racks == 1:
        return int(by_node.max()), None
    by_rack = bytes_across_tier(schedule, spec.world_size // spec.racks, nbytes=UPLINK_BYTES)
    return int(by_node.max()), int(by_rack.max())


def _described(spec: ClusterSpec) -> str:
    parts = [f"{spec.nodes} nodes", f"{spec.ranks_per_node} ranks each", f"{spec.rate}"]
    parts += [f"{spec.local_rate} inside"] if spec.local_rate else []
    parts += [f"{spec.racks} racks, uplinks {spec.uplink_rate}"] if spec.racks > 1 else []
    return ", ".join(parts)


def page(everything: Everything, name: str) -> str:
    lines = [
        "# Collectives on emulated clusters",
        "",
        "Written by `python benchmarks/collectives.py`; the JSON file beside it has every timing.",
        "Times are medians of the slowest rank, algorithms take turns, every result was checked",
        "bit for bit in the same run. *Rate* is the message over the time, as a share of the rate",
        "of a node's link; *over native* is how many times faster than gloo's own.",
        "",
        "## What was aimed at",
        "",
        *_targets(everything),
    ]
    for experiment in EXPERIMENTS:
        measured = [one for one in everything.timings if one.experiment == experiment.name]
        if measured:
            picture = [f"![{experiment.title}]({name}_{experiment.name}.svg)", ""]
            lines += ["", f"## {experiment.title}", ""]
            lines += picture if experiment.name in DRAWN else []
            lines += [*dict.fromkeys(one.made_with for one in measured), ""]
            lines += _table(measured)
    if everything.uplinks:
        lines += ["", "## Bytes over the uplinks, one all-reduce of 8 MB", ""]
        lines += [*dict.fromkeys(one.made_with for one in everything.uplinks), ""]
        lines += _uplinks(everything.uplinks)
    return "\n".join([*lines, ""])


def _uplinks(uplinks: Sequence[Uplinks]) -> Iterable[str]:
    yield "Counted by the kernel, frame headers and acknowledgements included."
    yield ""
    yield "| cluster | algorithm | MB out of a node | schedule | ratio | out of a rack | schedule |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for one in uplinks:
        counted = one.counted_by_rack
        rack = f"{counted / 1e6:.2f}" if counted is not None else ""
        rack_by_schedule = f"{one.expected_by_rack / 1e6:.2f}" if one.expected_by_rack else ""
        yield (
            f"| {_described(one.cluster)} | {one.algorithm} | {one.counted_by_node / 1e6:.2f} | "
            f"{one.expected_by_node / 1e6:.2f} | "
            f"{one.counted_by_node / one.expected_by_node:.3f} | {rack} | {rack_by_schedule} |"
        )


def _table(measured: Sequence[Measured]) -> Iterable[str]:
    yield "| cluster | operation | MB | algorithm | median ms | 10 % to 90 % | rate | over native |"
    yield "|---|---|---:|---|---:|---|---:|---:|"
    for result in measured:
        for timing in result.timings:
            native = next(
                other
                for other in result.timings
                if (other.op, other.bytes, other.algorithm) == (timing.op, timing.bytes, "native")
            )
            bits_per_s = parse_rate(result.cluster.rate or "1gbit")
            yield (
                f"| {_described(result.cluster)} | {timing.op} | {timing.bytes / 1e6:g} | "
                f"{timing.algorithm} | {timing.median_s * 1e3:.1f} | "
                f"{timing.p10_s * 1e3:.1f} to {timing.p90_s * 1e3:.1f} | "
                f"{timing.algbw_bytes_per_s * 8 / bits_per_s:.0%} | "
                f"{native.median_s / timing.median_s:.2f}x |"
            )
        assert all(timing.correct for timing in result.timings), "a wrong result"


DRAWN = {"sizes": "message in MB", "nodes": "nodes"}


def draw(everything: Everything, output: Path) -> None:
    """Draw the papers' two figures: time over message size, and over nodes."""
    for name, across in DRAWN.items():
        rows = [
            {
                "operation": timing.op,
                "algorithm": timing.algorithm,
                across: timing.bytes / 1e6 if name == "sizes" else one.cluster.nodes,
                "ms": timing.median_s * 1e3,
            }
            for one in everything.timings
            if one.experiment == name
            for timing in one.timings
        ]
        scale = alt.Scale(type="log") if name == "sizes" else alt.Scale(zero=False)
        chart = (
            alt.Chart(alt.InlineData(values=rows), width=220, height=240)
            .mark_line(point=True)
            .encode(
                x=alt.X(f"{across}:Q", scale=scale),
                y=alt.Y("ms:Q", scale=alt.Scale(type="log") if name == "sizes" else alt.Scale()),
                color=alt.Color("algorithm:N", sort=list(OF_THE_PAPER)),
                strokeDash=alt.StrokeDash("algorithm:N", sort=list(OF_THE_PAPER), legend=None),
                column=alt.Column("operation:N", sort=list(ROOTED), title=None),
            )
        )
        if rows:
            chart.save(str(output.with_name(f"{output.name}_{name}.svg")))


# What the project set out to reach: experiment, operation, bytes, ours, the other, at least.
TARGETS: list[tuple[str, Operation, int, str, str, float]] = [
    ("sizes", "broadcast", 32_000_000, "linear-pipeline", "native", 2.5),
    ("sizes", "reduce", 32_000_000, "linear-pipeline", "native", 1.3),
    ("sizes", "reduce", 32_000_000, "linear-pipeline", "mst", 1.7),
    ("ring", "all-reduce", 1_000_000, "ring", "native", 0.9),
    ("ring", "all-reduce", 4_000_000, "ring", "native", 0.9),
    ("ring", "all-reduce", 32_000_000, "ring", "native", 0.9),
    ("small", "all-reduce", 1_000, "recursive-doubling", "native", 1.3),
    ("small", "all-reduce", 4_000, "recursive-doubling", "native", 1.3),
    ("small", "all-reduce", 16_000, "recursive-doubling", "native", 1.3),
    ("blueconnect", "all-reduce", 8_000_000, "blueconnect", "native", 1.5),
    ("blueconnect", "all-reduce", 8_000_000, "blueconnect", "ring", 1.0),
    ("blueconnect", "all-reduce", 8_000_000, "blueconnect", "two-level", 1.0),
]


def _targets(everything: Everything) -> Iterable[str]:
    yield "| cluster | operation | MB | how many times faster | aim | measured |"
    yield "|---|---|---:|---|---:|---:|"
    for experiment, operation, nbytes, ours, other, aim in TARGETS:
        for one in everything.timings:
            taken_s = {
                timing.algorithm: timing.median_s
                for timing in one.timings
                if (timing.op, timing.bytes) == (operation, nbytes)
            }
            if one.experiment == experiment and taken_s:
                yield (
                    f"| {_described(one.cluster)} | {operation} | {nbytes / 1e6:g} | {ours} than "
                    f"{other} | {aim:g}x | {taken_s[other] / taken_s[ours]:.2f}x |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    names = [*(experiment.name for experiment in EXPERIMENTS), "uplinks"]
    parser.add_argument("--only", choices=names)
    parser.add_argument("--again", action="store_true", help="measure nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    for name in [] if options.again else [options.only] if options.only else names:
        everything = _with(_known(raw), name)  # kept after each, for a run may be interrupted
        raw.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1))
    draw(_known(raw), options.output)
    options.output.with_suffix(".md").write_text(page(_known(raw), options.output.name))


def _known(raw: Path) -> Everything:
    if not raw.exists():
        return Everything(timings=[], uplinks=[])
    return msgspec.json.decode(raw.read_bytes(), type=Everything)


def _with(known: Everything, name: str) -> Everything:
    """Return what is known, with one experiment measured anew."""
    if name == "uplinks":
        return Everything(timings=known.timings, uplinks=list(count_uplinks()))
    others = [one for one in known.timings if one.experiment != name]
    chosen = next(experiment for experiment in EXPERIMENTS if experiment.name == name)
    anew = list(measure(chosen))
    return Everything(timings=[*others, *anew], uplinks=known.uplinks)


if __name__ == "__main__":
    main()

"""What each precision gains, beside torch's runtimes: ``python benchmarks/policies.py OUTPUT``.

Today's models with their proportions, scaled down to fit the machine, replayed on emulated
clusters; compute is chosen so that communication takes 0.5, 1 and 2 times as long. Every runtime is
measured in turn with the others. Writes OUTPUT.json after each cell and OUTPUT.md in the end; a
cell takes five minutes on two cores, leave the machine alone meanwhile. ``--nodes``, ``--trace``
and ``--ratio`` choose cells, ``--append`` keeps those of OUTPUT.json, ``--again`` only writes the
page.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from statistics import mean

import msgspec
from intervals import half_width, paired_ratios
from made_with import made_with
from msgspec import Struct

from gradweave import Network, Trace, load_trace
from gradweave._src.advice import advise
from gradweave._src.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave._src.bench.training import Settings, compressions_of, to_measure, train_on_cluster
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.results import Result
from gradweave._src.runs import RunFolder
from gradweave._src.vocabulary import MIB, parse_rate

TRACES = ("bert-base", "gpt2", "vit-b16", "resnet50")
RATES = {4: "1gbit", 8: "500mbit"}
RATIOS = (0.5, 1.0, 2.0)
GRADIENT_BYTES = 16e6
FORWARD_SHARE = 1 / 3

TORCH, TUNED, FP16 = "torch-ddp", "torch-ddp-tuned", "torch-fp16-tuned"
POWER_SGD = ("powersgd:1", "powersgd:2", "powersgd:4")
EXACT, BOTH, ROUNDED, SPARSE = "gradweave", "sharded", "gradweave:rounded", "gtopk:0.001"
RUNTIMES = (TORCH, TUNED, FP16, *POWER_SGD, EXACT, BOTH, "rounded", ROUNDED, SPARSE)

# What the runtimes are called in advice, and which of them follow it.
ADVISED = {
    "torch-ddp": TORCH,
    "torch-ddp-tuned": TUNED,
    "exact": EXACT,
    "both-passes": BOTH,
    "rounded": "rounded",
    "sparse": SPARSE,
}


class Cell(Struct, frozen=True, kw_only=True):
    """One trace on one cluster, with compute for one ratio.

    Runtimes are ``advised`` by prediction, the fastest first.
    """

    made_with: str
    trace: str
    nodes: int
    ratio: float  # of communication to compute
    parameter_scale: float
    compute_s: float
    advised: list[str]
    results: list[Result]


def measure(traces: list[str], nodes: int, ratios: list[float], runs: Path) -> Iterator[Cell]:
    rate = RATES[nodes]
    with Cluster(ClusterSpec(nodes=nodes, rate=rate)) as cluster:
        network = _calibrated(cluster)
        for name, ratio in product(traces, ratios):
            trace, scale = _replayed(name, nodes, ratio)
            print(f"{name}, {nodes} nodes at {rate}, ratio {ratio:g}", flush=True)
            yield Cell(
                made_with=made_with(),
                trace=name,
                nodes=nodes,
                ratio=ratio,
                parameter_scale=scale,
                compute_s=trace.compute_s,
                advised=_advised(trace, network, nodes),
                results=_trained(cluster, network, trace, runs / f"{name}-{nodes}-{ratio:g}"),
            )


def _replayed(name: str, nodes: int, ratio: float) -> tuple[Trace, float]:
    whole = load_trace(name)
    scale = GRADIENT_BYTES / float(whole.nbytes.sum())
    small = whole.rescaled(parameter_scale=scale)
    s_per_byte = 8 / parse_rate(RATES[nodes])
    communication_s = 2 * (nodes - 1) / nodes * float(small.nbytes.sum()) * s_per_byte
    compute_s = communication_s / ratio
    trace = small.rescaled(
        forward_s=FORWARD_SHARE * compute_s, backward_s=(1 - FORWARD_SHARE) * compute_s
    )
    return trace, scale


def _calibrated(cluster: Cluster) -> Network:
    question = CalibrationQuestion(
        name=f"{cluster.spec.nodes} nodes at {cluster.spec.rate}",
        ways=to_measure(RUNTIMES),
        largest_bytes=8 * MIB,
        repeats=5,
        compressions=compressions_of(RUNTIMES),
    )
    return calibrate_cluster(cluster, question).beside_nothing()


def _advised(trace: Trace, network: Network, workers: int) -> list[str]:
    options = advise(trace, network, workers=workers).options
    return [ADVISED[option.name] for option in options if option.name in ADVISED]


def _trained(cluster: Cluster, network: Network, trace: Trace, folder: Path) -> list[Result]:
    settings = Settings(
        runtimes=RUNTIMES,
        mode="waiting",
        warmup=3,
        iterations=5,
        repeats=5,
        with_timelines=False,
    )
    return train_on_cluster(
        cluster,
        trace,
        network,
        settings,
        folder=RunFolder(folder),
        command="benchmarks/policies.py",
    )


def page(cells: list[Cell]) -> str:
    lines = [
        "# What each precision gains",
        "",
        "Made by `python benchmarks/policies.py`. Cells were measured at several commits; the "
        f"first table names each one's: {cells[0].made_with.partition(', ')[2]}",
        "",
        f"Models with their proportions, scaled down to {GRADIENT_BYTES / 1e6:g} MB of gradients, "
        "replayed on emulated nodes; *ratio* is what an all-reduce of all gradients takes by the "
        "links' rate alone, over compute (a third of it forward). Milliseconds of an iteration on "
        "the slowest rank: medians over five repeats, in turn, of medians over five iterations. "
        f"`{EXACT}` and `{ROUNDED}` plan by themselves, in training steps that are not timed here; "
        "`sharded`, `rounded` and `gtopk:0.001` follow plans for the calibrated network. `-tuned` "
        "is the best of a dozen values of `bucket_cap_mb`, found by trying. No runtime updates "
        "weights. Percentages: how far predictions, made before, are from what was measured.",
        "",
        "With so few megabytes torch's default cap of 25 MiB leaves it two buckets, which a whole "
        "model would not have: what counts is the comparison with the best cap.",
        "",
        *_times(cells),
        "",
        "## Ratios",
        "",
        "Of two times in the same repeat, how many times as fast the first is: mean and 95 % "
        "interval over five repeats.",
        "",
        *_ratios(cells),
        "",
        *_summary(cells),
        "",
        "## Advice",
        "",
        "What `gradweave advise` predicts to be fastest among these runtimes, from the calibrated "
        "network, and what was.",
        "",
        *_advice(cells),
    ]
    return "\n".join(lines) + "\n"


def _named(cell: Cell) -> str:
    return f"| {cell.trace} | {cell.parameter_scale:.3f} | {cell.nodes} | {cell.ratio:g} "


def _times(cells: list[Cell]) -> Iterator[str]:
    yield f"| trace | scale | nodes | ratio | compute | {' | '.join(RUNTIMES)} | commit |"
    yield f"|---|---:|---:|---:|---:|{'---:|' * len(RUNTIMES)}---|"
    for cell in cells:
        rows = {row.runtime: row for row in cell.results}
        times = (
            f"{rows[name].iteration_s * 1e3:,.0f} ({rows[name].prediction_error:+.0%})"
            for name in RUNTIMES
        )
        commit = cell.made_with.partition(",")[0].removeprefix("Commit ")
        yield f"{_named(cell)}| {cell.compute_s * 1e3:,.0f} | {' | '.join(times)} | {commit} |"


COMPARED = {
    "exact over best cap": (EXACT, TUNED),
    "both passes over best cap": (BOTH, TUNED),
    "rounded (by itself) over fp16 hook, best cap": (ROUNDED, FP16),
    "rounded (planned) over fp16 hook, best cap": ("rounded", FP16),
    "rounded (by itself) over torch DDP": (ROUNDED, TORCH),
    "rounded (planned) over torch DDP": ("rounded", TORCH),
    "rounded (by itself) over best cap": (ROUNDED, TUNED),
    "rounded (planned) over best cap": ("rounded", TUNED),
}


def _gains(cell: Cell, ours: str, other: str) -> list[float]:
    rows = {row.runtime: row for row in cell.results}
    return paired_ratios(rows[other].repeats_s, rows[ours].repeats_s)


def _best_power_sgd(cell: Cell) -> str:
    rows = {row.runtime: row for row in cell.results}
    return min(POWER_SGD, key=lambda name: rows[name].iteration_s)


def _compared(cell: Cell) -> dict[str, list[float]]:
    gains = {name: _gains(cell, *pair) for name, pair in COMPARED.items()}
    return gains | {"sparse over best PowerSGD": _gains(cell, SPARSE, _best_power_sgd(cell))}


def _ratios(cells: list[Cell]) -> Iterator[str]:
    names = list(_compared(cells[0]))
    yield f"| trace | scale | nodes | ratio | {' | '.join(names)} |"
    yield f"|---|---:|---:|---:|{'---:|' * len(names)}"
    for cell in cells:
        gains = (f"{mean(g):.2f}x ± {half_width(g):.2f}" for g in _compared(cell).values())
        yield f"{_named(cell)}| {' | '.join(gains)} |"


def _summary(cells: list[Cell]) -> Iterator[str]:
    yield "Over all cells: the geometric mean of the means above, and the least of them."
    yield ""
    yield "| | mean | least |"
    yield "|---|---:|---:|"
    for name in _compared(cells[0]):
        gains = [mean(_compared(cell)[name]) for cell in cells]
        if name.endswith("over torch DDP"):
            yield from _row(f"{name}, ratio {max(RATIOS):g}", cells, name)
        yield f"| {name} | {prod(gains) ** (1 / len(gains)):.2f}x | {min(gains):.2f}x |"


def _row(title: str, cells: list[Cell], name: str) -> Iterator[str]:
    gains = [mean(_compared(cell)[name]) for cell in cells if cell.ratio == max(RATIOS)]
    if gains:
        yield f"| {title} | {prod(gains) ** (1 / len(gains)):.2f}x | {min(gains):.2f}x |"


def _advice(cells: list[Cell]) -> Iterator[str]:
    yield "| trace | scale | nodes | ratio | advised | its time | fastest | its time |"
    yield "|---|---:|---:|---:|---|---:|---|---:|"
    for cell in cells:
        rows = {row.runtime: row.iteration_s * 1e3 for row in cell.results}
        fastest = min(rows, key=lambda name: rows[name])
        first = cell.advised[0]
        yield (f"{_named(cell)}| {first} | {rows[first]:,.0f} | {fastest} | {rows[fastest]:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--nodes", type=int, choices=RATES, default=4)
    parser.add_argument("--trace", action="append", choices=TRACES)
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--runs", type=Path, default=Path("runs/policies"))
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    data = options.output.with_suffix(".json")
    cells: list[Cell] = []
    if options.append or options.again:
        cells = msgspec.json.decode(data.read_bytes(), type=list[Cell])
    if not options.again:
        found = measure(
            options.trace or list(TRACES),
            options.nodes,
            options.ratio or list(RATIOS),
            options.runs,
        )
        for cell in found:
            cells.append(cell)
            data.write_bytes(msgspec.json.format(msgspec.json.encode(cells), indent=1))
    options.output.with_suffix(".md").write_text(page(cells))


if __name__ == "__main__":
    main()

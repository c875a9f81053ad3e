"""Broadcasts by pipeline and by gloo, run by run: ``python benchmarks/broadcasts.py OUTPUT``.

Each run has a cluster of its own, for gloo's time differs from one to the next. Writes OUTPUT.json
(every run) and OUTPUT.md (the distribution, and the share of the line's rate). Twenty runs take
about six minutes on two cores; leave the machine alone meanwhile. An interrupted command goes on
where it was; ``--again`` writes the page anew.
"""

import argparse
import sys
from pathlib import Path
from statistics import quantiles

import msgspec
from made_with import made_with
from msgspec import Struct

from gradweave._src.bench.collectives import time_on_cluster
from gradweave._src.costs import GIGABIT_ETHERNET
from gradweave._src.lab import ClusterSpec
from gradweave._src.measure.timings import Question
from gradweave._src.vocabulary import parse_rate

CLUSTER = ClusterSpec(nodes=4, rate="1gbit")
NBYTES = 32_000_000
OURS, GLOO = "linear-pipeline", "native"


class Run(Struct, frozen=True, kw_only=True):
    """Medians of the slowest rank on one cluster."""

    made_with: str
    nbytes: int
    seconds: dict[str, float]


def measured(nbytes: int, repeats: int) -> Run:
    question = Question(
        operations=("broadcast",),
        algorithms=(GLOO, OURS),
        sizes=(nbytes,),
        repeats=repeats,
        link=GIGABIT_ETHERNET,
    )
    timings = time_on_cluster(CLUSTER, question).timings
    if not all(timing.correct for timing in timings):
        raise SystemExit("a broadcast was wrong")
    seconds = {timing.algorithm: timing.median_s for timing in timings}
    return Run(made_with=made_with(), nbytes=nbytes, seconds=seconds)


def page(runs: list[Run]) -> str:
    assert CLUSTER.rate is not None
    bytes_per_s = parse_rate(CLUSTER.rate) / 8
    rows = {f"`{name}`, ms": [run.seconds[name] * 1e3 for run in runs] for name in (GLOO, OURS)}
    for name in (GLOO, OURS):
        rates = [100 * run.nbytes / run.seconds[name] / bytes_per_s for run in runs]
        rows[f"`{name}`, % of the line's rate"] = rates
    rows[f"`{GLOO}` / `{OURS}`"] = [run.seconds[GLOO] / run.seconds[OURS] for run in runs]
    lines = [
        "# Broadcast by linear pipeline and by gloo, run by run",
        "",
        f"Made by `python benchmarks/broadcasts.py`. {len(runs)} runs, each on a cluster of its "
        f"own: {CLUSTER.nodes} nodes at {CLUSTER.rate}, {runs[0].nbytes / 1e6:g} MB, medians of "
        "the slowest rank. A broadcast cannot be faster than its bytes over one link. gloo sends "
        "down a tree, so on four nodes it needs that twice at least, and three times where the "
        "root sends to everybody: a pipeline at the line's rate would be 2 to 3 times as fast.",
        "",
        *dict.fromkeys(run.made_with for run in runs),
        "",
        "| | least | first quartile | median | third quartile | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, values in rows.items():
        cells = (min(values), *quantiles(values, n=4, method="inclusive"), max(values))
        lines.append(f"| {name} | {' | '.join(f'{cell:,.2f}' for cell in cells)} |")
    lines += ["", "| run | gloo ms | pipeline ms | ratio |", "|---:|---:|---:|---:|"]
    lines += [
        f"| {number} | {run.seconds[GLOO] * 1e3:,.1f} | {run.seconds[OURS] * 1e3:,.1f} "
        f"| {run.seconds[GLOO] / run.seconds[OURS]:.2f} |"
        for number, run in enumerate(runs, start=1)
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--runs", type=int, default=20, help="default: 20")
    parser.add_argument("--bytes", type=int, default=NBYTES, help=f"default: {NBYTES}")
    parser.add_argument("--repeats", type=int, default=5, help="in each run (default: 5)")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    runs = msgspec.json.decode(raw.read_bytes(), type=list[Run]) if raw.exists() else []
    for number in range(len(runs), 0 if options.again else options.runs):
        print(f"run {number + 1} of {options.runs}", file=sys.stderr, flush=True)
        runs.append(measured(options.bytes, options.repeats))
        raw.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1))
    if len(runs) < 2:
        raise SystemExit("a distribution needs two runs at least")
    options.output.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()

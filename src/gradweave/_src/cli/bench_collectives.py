"""Time collectives, and check their results.

They are those of Gradweave and the backend's own, which is called native; the table has times,
bandwidths, and whether sums were right. Examples:

  gradweave bench collectives --nodes 4 --rate 1gbit --algorithm native,ring --size 64KB,32MB
  torchrun --nnodes 2 --nproc-per-node 4 … -m gradweave bench collectives --op all-reduce
"""

import argparse
from itertools import product

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src import collectives
from gradweave._src.bench.collectives import time_on_cluster
from gradweave._src.cli.arguments import add_operation_argument, names, whole_number
from gradweave._src.cli.clusters import (
    add_cluster_arguments,
    asked_to_measure,
    check_under_torchrun,
    nodes_per_rack,
)
from gradweave._src.cli.parser import told
from gradweave._src.cli.tables import print_json, print_table, progress_bar
from gradweave._src.costs import GIGABIT_ETHERNET
from gradweave._src.errors import RequestError
from gradweave._src.measure.timings import Question, Timing
from gradweave._src.vocabulary import (
    Operation,
    alternatives,
    milliseconds,
    parse_bytes,
    parse_rate,
    parse_spec,
)

FLOAT_BYTES = 4


class Row(Struct, frozen=True, kw_only=True):
    """A timing, and the cluster it was taken on; None where torchrun knows better."""

    nodes: int | None
    ranks_per_node: int | None
    rate: str | None
    timing: Timing

    def flat(self) -> dict[str, object]:
        own = {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "rate": self.rate}
        return {**own, **msgspec.to_builtins(self.timing)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = whole_number(least=1)
    what = parser.add_argument_group("what to time", "several are separated by commas")
    add_operation_argument(what)
    what.add_argument(
        "--algorithm",
        type=names,
        default=["native", "ring"],
        metavar="A",
        help="native or ours, as `gradweave list collectives` names them (default: native,ring)",
    )
    what.add_argument(
        "--size",
        type=_sizes,
        default=[10**6],
        metavar="S",
        help="size of a message with its unit, such as 64KB (default: 1MB)",
    )
    what.add_argument(
        "--repeats",
        type=count,
        default=7,
        metavar="N",
        help="how often each is timed (default: 7)",
    )
    add_cluster_arguments(parser, several=True)
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    _check_algorithms(options.op, options.algorithm)
    if options.nodes is None:
        _run_under_torchrun(options)
        return
    rows = []
    specs = [asked_to_measure(options, nodes) for nodes in options.nodes]
    for nodes, spec in zip(options.nodes, specs, strict=True):
        question = _question(options, nodes_per_rack(options, nodes))
        with progress_bar(question.timings, doing=f"{nodes} nodes") as advance:
            done = time_on_cluster(spec, question, loopback=options.loopback, advance=advance)
        rows += [
            Row(nodes=nodes, ranks_per_node=spec.ranks_per_node, rate=spec.rate, timing=timing)
            for timing in done.timings
        ]
    _print(rows, as_json=options.json)


def _run_under_torchrun(options: argparse.Namespace) -> None:
    check_under_torchrun(options)
    from gradweave._src.bench.collectives_job import in_default_group

    question = _question(options, None)
    rows: list[Row] = []
    with progress_bar(question.timings, doing="timing") as advance:

        def take(timing: Timing) -> None:
            rows.append(Row(nodes=None, ranks_per_node=None, rate=None, timing=timing))
            advance()

        in_default_group(question, on_timing=take)
    if rows:  # on rank 0
        _print(rows, as_json=options.json)


def _question(options: argparse.Namespace, rack_nodes: int | None) -> Question:
    link = GIGABIT_ETHERNET
    if options.rate is not None:
        link = replace(link, s_per_byte=8 / parse_rate(options.rate))
    return Question(
        operations=tuple(options.op),
        algorithms=tuple(options.algorithm),
        sizes=tuple(options.size),
        repeats=options.repeats,
        link=link,
        nodes_per_rack=rack_nodes,
    )


def _print(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        print_json([row.flat() for row in rows])
        return
    timings = [row.timing for row in rows]
    print_table(
        "times of the slowest rank; busbw is what the busiest link must carry (docs/measuring.md)",
        {
            "operation": [t.op for t in timings],
            "algorithm": [t.algorithm for t in timings],
            "ranks": [str(t.ranks) for t in timings],
            "MB": [f"{t.bytes / 1e6:,.3f}" for t in timings],
            "median ms": [milliseconds(t.median_s) for t in timings],
            "10 % ms": [milliseconds(t.p10_s) for t in timings],
            "90 % ms": [milliseconds(t.p90_s) for t in timings],
            "algbw MB/s": [f"{t.algbw_bytes_per_s / 1e6:,.1f}" for t in timings],
            "busbw MB/s": [f"{t.busbw_bytes_per_s / 1e6:,.1f}" for t in timings],
            "correct": ["yes" if t.correct else "NO" for t in timings],
        },
    )


def _check_algorithms(operations: list[Operation], algorithms: list[str]) -> None:
    """Refuse algorithms that there are not, before a cluster is built for them."""
    for operation, algorithm in product(operations, algorithms):
        known = ["native", *collectives.names(operation)]
        if parse_spec(algorithm).name not in known:
            others = alternatives(parse_spec(algorithm).name, known)
            raise RequestError(f"no {operation} by {algorithm!r}{others}")


@told
def _sizes(text: str) -> list[int]:
    """Return sizes of float32 messages, which are whole multiples of four bytes."""
    sizes = [parse_bytes(part) for part in names(text)]
    for nbytes in sizes:
        if nbytes % FLOAT_BYTES:
            raise RequestError(f"messages are float32; {nbytes} is not a multiple of 4")
    return sizes

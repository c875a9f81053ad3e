"""The papers' closed forms: what an operation by a collective costs on given links.

A new formula is one function and one line in ``FORMULAS``.
"""

from collections.abc import Callable, Mapping

from gradweave.compression import Compression, Method
from gradweave.costs import (
    all_reduce,
    hierarchy,
    parameter_server,
    pipeline,
    scatter_gather,
    sparse,
)
from gradweave.costs.cost import FREE, Cost, Curve, Line, fit_line
from gradweave.costs.links import Level, Link, Links, flat
from gradweave.errors import RequestError, UnknownCost
from gradweave.words import Operation, parse_bytes, parse_spec, refuse_argument

__all__ = [
    "FORMULAS",
    "FREE",
    "Cost",
    "Curve",
    "Level",
    "Line",
    "Link",
    "Links",
    "closed_form",
    "fit_line",
    "flat",
    "sparse_closed_form",
]

Formula = Callable[[Links, int, str | None], Cost]


def _plain(form: Callable[[Link, int], Cost]) -> Formula:
    """A formula that sees one kind of link and takes no argument."""
    return _tiered(lambda links, workers: form(links.slowest(workers), workers))


def _tiered(form: Callable[[Links, int], Cost]) -> Formula:
    def priced(links: Links, workers: int, argument: str | None) -> Cost:
        refuse_argument(argument)
        return form(links, workers)

    return priced


def _blocked(form: Callable[[Link, int, int | None], Cost]) -> Formula:
    """``linear-pipeline`` chooses its block, ``linear-pipeline:64KiB`` is given one."""
    return lambda links, workers, block: form(
        links.slowest(workers), workers, None if block is None else parse_bytes(block)
    )


def _served(form: Callable[[Link, int, int], Cost]) -> Formula:
    """``parameter-server`` has one server, ``parameter-server:4`` four."""

    def priced(links: Links, workers: int, servers: str | None) -> Cost:
        if servers is not None and not servers.isdecimal():
            raise RequestError(f"a number of servers must follow the colon, got {servers!r}")
        return form(links.slowest(workers), workers, int(servers or 1))

    return priced


FORMULAS: Mapping[tuple[Operation, str], Formula] = {
    ("all-reduce", "ring"): _plain(all_reduce.ring),
    ("all-reduce", "binary-tree"): _plain(all_reduce.binary_tree),
    ("all-reduce", "recursive-doubling"): _plain(all_reduce.recursive_doubling),
    ("all-reduce", "halving-doubling"): _plain(all_reduce.halving_doubling),
    ("all-reduce", "double-tree"): _plain(all_reduce.double_tree),
    ("all-reduce", "linear-pipeline"): _blocked(pipeline.pipeline_all_reduce),
    ("all-reduce", "mst"): _plain(pipeline.mst_all_reduce),
    ("all-reduce", "exchange"): _plain(all_reduce.halving_doubling),
    ("all-reduce", "two-level"): _tiered(hierarchy.two_level),
    ("all-reduce", "blueconnect"): _tiered(hierarchy.blueconnect),
    ("all-reduce", "parameter-server"): _served(parameter_server.push_then_pull),
    ("broadcast", "linear-pipeline"): _blocked(pipeline.pipeline_broadcast),
    ("broadcast", "mst"): _plain(pipeline.mst_broadcast),
    ("broadcast", "exchange"): _plain(pipeline.exchange_broadcast),
    ("broadcast", "parameter-server"): _served(parameter_server.pull),
    ("reduce", "linear-pipeline"): _blocked(pipeline.pipeline_reduce),
    ("reduce", "mst"): _plain(pipeline.mst_reduce),
    ("reduce", "exchange"): _plain(pipeline.exchange_reduce),
    ("reduce", "parameter-server"): _served(parameter_server.push),
    ("reduce-scatter", "ring"): _plain(scatter_gather.ring_reduce_scatter),
    ("reduce-scatter", "halving-doubling"): _plain(scatter_gather.halving_reduce_scatter),
    ("all-gather", "ring"): _plain(scatter_gather.ring_all_gather),
    ("all-gather", "halving-doubling"): _plain(scatter_gather.doubling_all_gather),
}

SPARSE_FORMULAS: Mapping[Method, Callable[[Link, int, float], Cost]] = {
    "topk": sparse.topk,
    "gtopk": sparse.gtopk,
}


def closed_form(operation: Operation, collective: str, links: Links, workers: int) -> Cost:
    name, argument = parse_spec(collective)
    if (operation, name) not in FORMULAS:
        known = ", ".join(c for op, c in FORMULAS if op == operation)
        raise UnknownCost(f"no formula for {operation} by {collective!r}; there are {known}")
    return FORMULAS[operation, name](links, workers, argument)


def sparse_closed_form(compression: Compression, links: Links, workers: int) -> Cost:
    form = SPARSE_FORMULAS[compression.method]
    return form(links.slowest(workers), workers, compression.density)

"""The papers' closed forms: what an operation by a collective costs on given links.

A new formula is one function and one line in ``FORMULAS``.
"""

from collections.abc import Callable, Mapping

from gradweave._src.compression import Compression, ExchangeName
from gradweave._src.costs import (
    all_reduce,
    hierarchy,
    parameter_server,
    pat,
    pipeline,
    scatter_gather,
    sparse,
)
from gradweave._src.costs.cost import (
    FREE,
    Cheapest,
    Cost,
    Curve,
    Fit,
    Line,
    Share,
    Times,
    Total,
    fit,
    fit_line,
    least_squares,
    total_line,
)
from gradweave._src.costs.links import GIGABIT_ETHERNET, Level, Link, Links, flat
from gradweave._src.errors import UnknownCost
from gradweave._src.vocabulary import (
    Operation,
    Spec,
    alternatives,
    parse_bytes,
    parse_servers,
    parse_spec,
    refuse_argument,
)

__all__ = [
    "FORMULAS",
    "FREE",
    "GIGABIT_ETHERNET",
    "Cheapest",
    "Cost",
    "Curve",
    "Fit",
    "Level",
    "Line",
    "Link",
    "Links",
    "Share",
    "Times",
    "Total",
    "closed_form",
    "fit",
    "fit_line",
    "flat",
    "has_formula",
    "least_squares",
    "sparse_closed_form",
    "total_line",
]

Formula = Callable[[Links, int, Spec], Cost]


def _one_stream(form: Callable[[Link, int], Cost]) -> Formula:
    """Price by the slowest link, for at most one message at a time crosses an uplink."""
    return _tiered(lambda links, workers: form(links.slowest(workers), workers))


def _many_streams(form: Callable[[Link, int], Cost]) -> Formula:
    """Price on one tier only: many messages would share an uplink, which formulas do not know."""

    def priced(links: Links, workers: int, spec: Spec) -> Cost:
        refuse_argument(spec)
        return form(_only_link(links, workers, spec.name), workers)

    return priced


def _only_link(links: Links, workers: int, name: str) -> Link:
    factors = links.factors(workers)
    if factors is None or sum(size > 1 for size in factors) > 1:
        raise UnknownCost(
            f"{name!r} has a formula for equal links only, and {workers} workers span several "
            "tiers; take ring, linear-pipeline, two-level or blueconnect"
        )
    return links.slowest(workers)


def _tiered(form: Callable[[Links, int], Cost]) -> Formula:
    def priced(links: Links, workers: int, spec: Spec) -> Cost:
        refuse_argument(spec)
        return form(links, workers)

    return priced


def _blocked(form: Callable[[Link, int, int | None], Cost]) -> Formula:
    """Price the best block for ``linear-pipeline``, and that of ``linear-pipeline:64KiB``."""
    return lambda links, workers, spec: form(
        links.slowest(workers),
        workers,
        None if spec.argument is None else parse_bytes(spec.argument),
    )


def _served(form: Callable[[Link, int, int], Cost]) -> Formula:
    """Price ``parameter-server`` with one server, and ``parameter-server:4`` with four."""

    def priced(links: Links, workers: int, spec: Spec) -> Cost:
        servers = parse_servers(spec, workers)
        if servers == 1:
            return form(links.slowest(workers), workers, 1)
        return form(_only_link(links, workers, spec.name), workers, servers)

    return priced


def _tier_by_tier(operation: Operation) -> Formula:
    """Price ``blueconnect`` as its paper does, or by each tier's way: ``blueconnect:ring/pat``."""
    return lambda links, workers, spec: hierarchy.blueconnect(
        links, workers, spec, operation=operation
    )


FORMULAS: Mapping[tuple[Operation, str], Formula] = {
    ("all-reduce", "ring"): _one_stream(all_reduce.ring),
    ("all-reduce", "binary-tree"): _many_streams(all_reduce.binary_tree),
    ("all-reduce", "recursive-doubling"): _many_streams(all_reduce.recursive_doubling),
    ("all-reduce", "halving-doubling"): _many_streams(all_reduce.halving_doubling),
    ("all-reduce", "pat"): _many_streams(pat.all_reduce),
    ("all-reduce", "double-tree"): _many_streams(all_reduce.double_tree),
    ("all-reduce", "linear-pipeline"): _blocked(pipeline.pipeline_all_reduce),
    ("all-reduce", "mst"): _many_streams(pipeline.mst_all_reduce),
    ("all-reduce", "exchange"): _many_streams(all_reduce.halving_doubling),
    ("all-reduce", "two-level"): _tiered(hierarchy.two_level),
    ("all-reduce", "blueconnect"): _tier_by_tier("all-reduce"),
    ("all-reduce", "parameter-server"): _served(parameter_server.push_then_pull),
    ("broadcast", "linear-pipeline"): _blocked(pipeline.pipeline_broadcast),
    ("broadcast", "mst"): _many_streams(pipeline.mst_broadcast),
    ("broadcast", "exchange"): _many_streams(pipeline.exchange_broadcast),
    ("broadcast", "parameter-server"): _served(parameter_server.pull),
    ("reduce", "linear-pipeline"): _blocked(pipeline.pipeline_reduce),
    ("reduce", "mst"): _many_streams(pipeline.mst_reduce),
    ("reduce", "exchange"): _many_streams(pipeline.exchange_reduce),
    ("reduce", "parameter-server"): _served(parameter_server.push),
    ("reduce-scatter", "ring"): _one_stream(scatter_gather.ring_reduce_scatter),
    ("reduce-scatter", "halving-doubling"): _many_streams(scatter_gather.halving_reduce_scatter),
    ("reduce-scatter", "pat"): _many_streams(pat.reduce_scatter),
    ("reduce-scatter", "blueconnect"): _tier_by_tier("reduce-scatter"),
    ("all-gather", "ring"): _one_stream(scatter_gather.ring_all_gather),
    ("all-gather", "halving-doubling"): _many_streams(scatter_gather.doubling_all_gather),
    ("all-gather", "pat"): _many_streams(pat.all_gather),
    ("all-gather", "blueconnect"): _tier_by_tier("all-gather"),
}

SPARSE_FORMULAS: Mapping[ExchangeName, Callable[[Link, int, float], Line]] = {
    "topk": sparse.all_gather,
    "gtopk": sparse.butterfly,
    "gtopk-tree": sparse.tree,
    "gtopk-tree-lossy": sparse.tree,
    "gtopk-all-gather": sparse.all_gather,
}


def has_formula(operation: Operation, collective: str) -> bool:
    return (operation, parse_spec(collective).name) in FORMULAS


def closed_form(operation: Operation, collective: str, links: Links, workers: int) -> Cost:
    spec = parse_spec(collective)
    if (operation, spec.name) not in FORMULAS:
        known = alternatives(spec.name, [c for op, c in FORMULAS if op == operation])
        raise UnknownCost(f"no formula for {operation} by {collective!r}{known}")
    return FORMULAS[operation, spec.name](links, workers, spec)


def sparse_closed_form(compression: Compression, links: Links, workers: int) -> Line:
    assert compression.exchange is not None
    form = SPARSE_FORMULAS[compression.exchange]
    return form(_only_link(links, workers, compression.method), workers, compression.density)

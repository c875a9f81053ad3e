"""Compression as planners see it: what it costs, and whether it pays."""

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.compression import Compression
from gradweave._src.costs import Line, sparse_closed_form
from gradweave._src.errors import UnknownCost
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.plan import Plan
from gradweave._src.planning import make_plan
from gradweave._src.simulation import simulate
from gradweave._src.trace import Trace


class Verdict(Struct, frozen=True, kw_only=True):
    """Predicted iterations with compression, and with the best plan without it.

    ``str()`` of it says in a sentence whether compression pays.

    Attributes:
        compressed_s: predicted seconds of an iteration with compression.
        dense_s: predicted seconds with the best plan without compression.
    """

    compressed_s: float
    dense_s: float

    @property
    def pays(self) -> bool:
        """Whether compression is predicted to be faster."""
        return self.compressed_s < self.dense_s

    def __str__(self) -> str:
        times = (
            f"predicted {self.compressed_s * 1e3:.1f} ms an iteration with it, "
            f"{self.dense_s * 1e3:.1f} ms with the best dense plan"
        )
        if self.pays:
            return f"Compression pays: {times}."
        return f"Compression does not pay on this network: {times}; leave it out."


def with_compression_price(
    network: Network,
    compression: Compression,
    *,
    selection_s_per_element: float,
    exchange: Line,
    workers: int,
) -> Network:
    """Return the network with what this compression was measured to cost on it."""
    # A noisy machine may make many bytes seem to cost nothing.
    least = _least_s_per_byte(network, compression, workers)
    cost = replace(exchange, s_per_byte=max(exchange.s_per_byte, least))
    priced = CollectiveCost(
        operation="all-reduce", collective=str(compression), workers=workers, cost=cost
    )
    others = tuple(entry for entry in network.costs if entry.collective != priced.collective)
    return replace(
        network, selection_s_per_element=selection_s_per_element, costs=(*others, priced)
    )


def _least_s_per_byte(network: Network, compression: Compression, workers: int) -> float:
    """Return the least price of a byte by the links alone, where there is a formula."""
    if network.links is None:
        return 0.0
    try:
        return sparse_closed_form(compression, network.links, workers).s_per_byte
    except UnknownCost:
        return 0.0


def verdict(trace: Trace, plan: Plan, network: Network, *, workers: int) -> Verdict | None:
    """Return whether the plan's compression pays; None where it sends nothing compressed."""
    if not any(bucket.is_sparse for bucket in plan.buckets):
        return None
    dense = make_plan(
        trace,
        network,
        workers=workers,
        planner="optimal:0",
        collective=plan.buckets[0].collective,
    )
    compressed_s, dense_s = (
        simulate(trace, one, network, workers=workers).iteration_s for one in (plan, dense)
    )
    return Verdict(compressed_s=compressed_s, dense_s=dense_s)

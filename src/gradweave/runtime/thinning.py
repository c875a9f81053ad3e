"""Compression as planners see it: what it costs here, and whether it pays."""

import torch
from msgspec import Struct
from msgspec.structs import replace

from gradweave.comm.agree import largest
from gradweave.compression import Compression
from gradweave.costs import sparse_closed_form
from gradweave.errors import UnknownCost
from gradweave.network import CollectiveCost, Network
from gradweave.plan import Plan
from gradweave.planning import make_plan
from gradweave.simulation import simulate
from gradweave.sparse.exchanger import Exchanger
from gradweave.sparse.settings import GTopK, Sparse, TopK
from gradweave.sparse.timing import exchange_cost, selection_s_per_element
from gradweave.trace import Trace

# Beyond every warm-up.
LAST_STEP = 1 << 60


class Verdict(Struct, frozen=True, kw_only=True):
    """Predicted iterations, with compression and with the best plan without it."""

    compressed_s: float
    dense_s: float

    @property
    def pays(self) -> bool:
        return self.compressed_s < self.dense_s

    def __str__(self) -> str:
        times = (
            f"predicted {self.compressed_s * 1e3:.1f} ms an iteration with it, "
            f"{self.dense_s * 1e3:.1f} ms with the best dense plan"
        )
        if self.pays:
            return f"Compression pays: {times}."
        return f"Compression does not pay on this network: {times}; leave it out."


def compression_at(settings: Sparse, step: int = LAST_STEP) -> Compression:
    """With the density of this step, or the one that will last."""
    return Compression(method=settings.exchange, density=settings.density_at(step))


def settings_for(compression: Compression) -> Sparse:
    """What does as it is priced."""
    kind = TopK if compression.method == "topk" else GTopK
    return kind(density=compression.density, exchange=compression.method)


def with_sparse_prices(
    network: Network,
    settings: Sparse,
    exchanger: Exchanger,
    *,
    numel: int,
    like: torch.Tensor,
    step: int = LAST_STEP,
) -> Network:
    """For gradients like these, as measured now on the slowest rank.

    Call it on every rank, while the exchanger has nothing else to do.
    """
    compression = compression_at(settings, step)
    mine_s = selection_s_per_element(
        numel, like=like, density=compression.density, settings=settings
    )
    (slowest_s,) = largest(exchanger.group, [mine_s], device=torch.device("cpu"))
    workers = exchanger.group.size()
    cost = exchange_cost(exchanger, exchange=settings.exchange, density=compression.density)
    # A noisy machine may make many bytes seem to cost nothing.
    least = _least_s_per_byte(network, compression, workers)
    cost = replace(cost, s_per_byte=max(cost.s_per_byte, least))
    exchange = CollectiveCost(
        operation="all-reduce", collective=str(compression), workers=workers, cost=cost
    )
    others = tuple(entry for entry in network.costs if entry.collective != exchange.collective)
    return replace(network, selection_s_per_element=slowest_s, costs=(*others, exchange))


def _least_s_per_byte(network: Network, compression: Compression, workers: int) -> float:
    """By the links alone, where there is a formula for them."""
    if network.links is None:
        return 0.0
    try:
        return sparse_closed_form(compression, network.links, workers).s_per_byte
    except UnknownCost:
        return 0.0


def verdict(trace: Trace, plan: Plan, network: Network, *, workers: int) -> Verdict | None:
    """None where the plan sends nothing compressed."""
    if all(bucket.compression is None for bucket in plan.buckets):
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

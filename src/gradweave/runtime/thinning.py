"""Compression as planners see it: what it costs here, and whether it pays."""

from collections.abc import Mapping

import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from gradweave.comm.agree import group_device, largest
from gradweave.compression import Compression, Method
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.planning import make_plan
from gradweave.simulation import simulate
from gradweave.sparse.settings import Sparse
from gradweave.sparse.timing import selection_s_per_element
from gradweave.trace import Trace

# Beyond every warm-up.
LAST_STEP = 1 << 60
PRICED_AS: Mapping[str, Method] = {
    "topk": "topk",
    "gtopk-all-gather": "topk",
    "gtopk-tree": "gtopk",
    "gtopk-tree-lossy": "gtopk",
    "gtopk-butterfly": "gtopk-butterfly",
}


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


def planned_compression(settings: Sparse) -> Compression:
    """With the density that will last."""
    return Compression(method=PRICED_AS[settings.exchange], density=settings.density_at(LAST_STEP))


def with_selection_cost(
    network: Network,
    settings: Sparse,
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
) -> Network:
    """As measured now on the slowest rank; call it on every rank."""
    mine_s = selection_s_per_element(
        sum(parameter.numel() for parameter in parameters.values()),
        like=next(iter(parameters.values())),
        density=settings.density_at(LAST_STEP),
        method=settings.selection,
    )
    (slowest_s,) = largest(group, [mine_s], device=group_device(group))
    return replace(network, selection_s_per_element=slowest_s)


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

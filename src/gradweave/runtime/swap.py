"""Giving a live wrapper other buckets: the one place that knows torch's private names.

A fresh wrapper of torch's is built around the same module, and its reducer moves over. The live
wrapper keeps its hooks, submodules and flags, which running its constructor again would drop.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

# What belongs to a reducer, and must come from the wrapper that built it.
MOVED = (
    "reducer",
    "logger",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "bucket_bytes_cap_default",
    "_bucket_config",
    "_has_rebuilt_buckets",
)
# Of a static graph only: torch sets it in the wrapper that watches the first backward.
STATIC = "_static_graph_delay_allreduce_enqueued"


def swap_reducer(
    ddp: TorchDDP,
    parameters: Iterable[nn.Parameter],
    *,
    bucket_cap_mb: float | None,
    caps_mb: Sequence[float],
) -> None:
    """At a step boundary. ``caps_mb`` are one cap per bucket; without them torch's own rule.

    ``parameters`` are those of the first reducer: some may be frozen at the moment. The planned
    buckets hold from the second step on, with a static graph from the third: torch first learns the
    order of gradients.
    """
    with _all_unfrozen(parameters):
        fresh = TorchDDP(
            ddp.module,
            device_ids=ddp.device_ids,
            output_device=ddp.output_device,
            dim=ddp.dim,
            init_sync=False,
            process_group=ddp.process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            skip_all_reduce_unused_params=ddp.skip_all_reduce_unused_params,
            bucket_cap_mb_list=list(caps_mb) or None,  # type: ignore[arg-type]
            batched_grad_copy=ddp.batched_grad_copy,
            forward_sync_buffers=ddp.forward_sync_buffers,
        )
    for name in MOVED:
        setattr(ddp, name, getattr(fresh, name))
    if hasattr(fresh, STATIC):
        setattr(ddp, STATIC, getattr(fresh, STATIC))
    ddp._comm_hooks = []  # noqa: SLF001 the new reducer has none yet


def bucket_fields(ddp: TorchDDP) -> dict[str, object]:
    """From which a copy of the wrapper would build its reducer."""
    return {name: getattr(ddp, name) for name in MOVED if "bucket" in name}


@contextmanager
def _all_unfrozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """torch looks which parameters require a gradient when it builds a reducer, and only then."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)  # noqa: FBT003
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003

"""Giving a live wrapper other buckets: the one place that knows torch's private names.

A fresh wrapper of torch's is built around the same module, and its reducer moves over. The live
wrapper keeps its hooks, submodules and flags, which running its constructor again would drop.
"""

from collections.abc import Sequence

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


def swap_reducer(ddp: TorchDDP, *, bucket_cap_mb: float | None, caps_mb: Sequence[float]) -> None:
    """At a step boundary. ``caps_mb`` are one cap per bucket; without them torch's own rule.

    The planned buckets hold from the second step on, with a static graph from the third: torch
    first learns the order of gradients.
    """
    # torch allows no two reducers to hook the same parameters, so the old one goes first.
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]
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

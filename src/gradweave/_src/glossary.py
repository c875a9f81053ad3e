"""What each runtime of `gradweave bench training` does, in a line that people read.

Planners and compressions are runtimes too; what they do stands beside their tables.
"""

from collections.abc import Mapping

from gradweave._src.compression import COMPRESSION_SUMMARIES
from gradweave._src.planning import PLANNERS, planner_summary

RUNTIMES: Mapping[str, str] = {
    "torch-ddp": "torch as it comes: a first bucket of 1 MiB, then of 25 MiB",
    "torch-ddp-tuned": "torch with its best bucket_cap_mb, found by trying",
    "gradweave": "Gradweave's wrapper by itself: it measures, plans and tries while the model "
    "trains; gradweave:rounded may round",
    "sharded": "gradients scattered beside backward, parameters gathered beside the next forward; "
    "sharded:wfbp names a planner",
    "rounded": "planned among messages as they are, in bf16 and in 8 bits",
    "torch-fp16": "torch with its hook that rounds gradients to fp16",
    "torch-fp16-tuned": "torch with its hook for fp16 and the best bucket_cap_mb for it",
    "torch-bf16": "torch with its hook that rounds gradients to bf16",
    "torch-bf16-tuned": "torch with its hook for bf16 and the best bucket_cap_mb for it",
    "powersgd": "torch with its hook for PowerSGD: matrices as products of thin ones; powersgd:2 "
    "names their rank",
    "zero": "torch, and its ZeRO: each worker updates a share of the parameters and broadcasts it",
    "fsdp2": "torch's fully_shard: parameters gathered for each pass, gradients scattered; "
    "fsdp2:single names a planner that groups them",
    "bsp-reduce-broadcast": "gradients reduced to one rank, which updates; weights broadcast",
    "bsp-allreduce": "gradients all-reduced after backward, every rank updates",
    "bsp-overlap": "layer by layer: reduced beside backward, broadcast beside the next forward; "
    "bsp-overlap:mst names a collective",
    **{name: planner_summary(name) for name in PLANNERS},
    **COMPRESSION_SUMMARIES,
}

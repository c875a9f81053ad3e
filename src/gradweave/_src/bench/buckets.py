"""Whether a wrapper of torch's sends the buckets that a plan says."""

from collections.abc import Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

from gradweave._src.errors import PlanMismatch
from gradweave._src.plan import Plan
from gradweave._src.torch_internals import torch_bucket_bytes


def bucket_bytes(plan: Plan, bytes_of: Mapping[str, int]) -> list[int]:
    return [sum(bytes_of[name] for name in bucket.tensors) for bucket in plan.buckets]


def check_buckets(ddp: DistributedDataParallel, planned: Sequence[int]) -> None:
    """Raise PlanMismatch unless torch's buckets have the planned sizes."""
    found = torch_bucket_bytes(ddp)
    if found == list(planned):
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(found, planned, strict=False)) if a != b),
        min(len(found), len(planned)),
    )
    sizes = [
        f"{sizes[place]} bytes" if place < len(sizes) else "none" for sizes in (planned, found)
    ]
    raise PlanMismatch(
        f"torch made {len(found)} buckets where {len(planned)} are planned; the first that differs "
        f"is bucket {place + 1}: planned {sizes[0]}, found {sizes[1]}; gradients came in another "
        "order than recorded: record a new trace"
    )

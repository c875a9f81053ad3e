"""A plan in the words of torch's DistributedDataParallel: a cap for each bucket.

torch closes a bucket as soon as it holds at least its cap, so caps that are the exact sizes of the
planned buckets give the planned buckets, from the second iteration on: the first one uses the order
of declaration.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave.errors import PlanMismatch, RequestError
from gradweave.plan import Plan
from gradweave.words import MIB


def planned_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Whose gradients travel, by the names they have where nothing is compiled."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


def modules_with_sparse_gradients(module: nn.Module) -> Iterator[str]:
    """Their names; what such gradients hold is not known before each step."""
    for name, part in module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and part.weight.requires_grad:
            yield name or type(part).__name__


def check_compressible(module: nn.Module, *, skips_unused: bool) -> None:
    """Before anything is built: some gradients cannot be selected from."""
    if skips_unused:
        raise RequestError(
            "residuals travel in every step, also those of unused parameters; leave out "
            "skip_all_reduce_unused_params, or leave out compression"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise RequestError(
                f"{name!r} is complex, and the largest are selected of real numbers; leave out "
                "compression"
            )
    for name in modules_with_sparse_gradients(module):
        raise RequestError(
            f"{name!r} has sparse gradients, which travel by themselves; use sparse=False there, "
            "or leave out compression"
        )


def bucket_bytes(plan: Plan, bytes_of: Mapping[str, int]) -> list[int]:
    return [sum(bytes_of[name] for name in bucket.tensors) for bucket in plan.buckets]


def bucket_caps_mb(plan: Plan, bytes_of: Mapping[str, int]) -> list[float]:
    """For ``bucket_cap_mb_list``. Dividing by a power of two loses nothing."""
    return [nbytes / MIB for nbytes in bucket_bytes(plan, bytes_of)]


def torch_bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    """The buckets torch has built from the order in which gradients came; empty until it says so.

    With unused parameters to find, torch keeps its first buckets, in the order of declaration.
    """
    logging_data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
    keeps_first = ddp.find_unused_parameters and not ddp.static_graph
    logged = str(logging_data.get("bucket_sizes" if keeps_first else "rebuilt_bucket_sizes", ""))
    return [int(size) for size in logged.split(",") if size.strip()]


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

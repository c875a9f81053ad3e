"""What a user may ask of the runtime, checked before anything is built."""

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

from gradweave import collectives
from gradweave.errors import RequestError
from gradweave.planning import find_planner
from gradweave.sparse.settings import Sparse
from gradweave.words import parse_spec

AUTO = "auto"
WIRE_DTYPES = (torch.float16, torch.bfloat16)

# With these torch's wrapper cannot be given other buckets while it lives.
UNPLANNABLE = (
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
    "bucket_cap_mb_list",
)


class Options(Struct, frozen=True, kw_only=True):
    planner: str = "optimal"
    collective: str = AUTO
    compression: Sparse | None = None
    wire_dtype: torch.dtype | None = None
    record_steps: int = 5
    trial_steps: int = 5
    replan_when: float | None = None
    timeline: bool = False

    def __post_init__(self) -> None:
        find_planner(self.planner)
        known = [AUTO, "native", *collectives.names("all-reduce")]
        if self.collective != AUTO and parse_spec(self.collective).name not in known:
            raise RequestError(f"no collective {self.collective!r}; there are {', '.join(known)}")
        if self.wire_dtype is not None and self.wire_dtype not in WIRE_DTYPES:
            raise RequestError(
                f"wire_dtype must be torch.float16 or torch.bfloat16, got {self.wire_dtype}"
            )
        if self.compression is not None and (self.wire_dtype or self.collective != AUTO):
            raise RequestError(
                "compression sends values and indices its own way; leave out wire_dtype and "
                "collective"
            )
        for name, least in (("record_steps", 1), ("trial_steps", 0)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.replan_when is not None and not self.replan_when > 0:
            raise RequestError(f"replan_when must be positive, got {self.replan_when}")


def check_caps(torch_options: Mapping[str, Any]) -> None:
    """torch takes caps that make no sense without a word."""
    caps = torch_options.get("bucket_cap_mb_list")
    if caps is not None and not caps:
        raise RequestError("bucket_cap_mb_list must not be empty; leave it out for torch's default")
    one = torch_options.get("bucket_cap_mb")
    for cap in [*(caps or ()), *([] if one is None else [one])]:
        if not 0 < cap < float("inf"):
            raise RequestError(f"bucket caps must be positive numbers of MiB, got {cap}")


def why_unplannable(
    parameters: Mapping[str, torch.nn.Parameter], torch_options: Mapping[str, object], workers: int
) -> str | None:
    """Why torch's own buckets stay, in words; None where a plan can be carried out."""
    if workers == 1:
        return "one worker sends no messages"
    for name in UNPLANNABLE:
        if torch_options.get(name) is not None:
            return f"{name} is given"
    kinds = {(str(p.dtype), str(p.device)) for p in parameters.values()}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        return f"torch buckets each type and device by itself, and there are {found}"
    if any(hasattr(p, "_in_backward_optimizers") for p in parameters.values()):
        return "an optimizer runs in backward"
    return None

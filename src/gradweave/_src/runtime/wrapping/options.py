"""What a user may ask of the runtime, checked before anything is built."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from gradweave._src import collectives
from gradweave._src.collectives.topology import Topology
from gradweave._src.compression import (
    EXACT,
    PRECISIONS,
    ROUNDED,
    ROUNDING_NAMES,
    SPARSE,
    Compression,
    RoundingName,
    check_precision,
)
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.planning import (
    FOR_ROUNDED,
    FOR_SMALL_MESSAGES,
    FOR_TIERS,
    WITHOUT_OVERLAP,
    find_planner,
)
from gradweave._src.runtime.wrapping.parameters import modules_with_sparse_gradients
from gradweave._src.sparse.settings import Sparse
from gradweave._src.torch_internals import (
    has_optimizer_in_backward,
    unfollowed_options,
    why_no_other_buckets,
)
from gradweave._src.travel import Travel, parse_travel
from gradweave._src.vocabulary import alternatives, closest, parse_spec

AUTO = "auto"

# For users who give ``precision`` one of torch's types.
PRECISION_OF = {
    torch.float32: EXACT,
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}

# Options with which torch's wrapper cannot be given other buckets while it lives.
UNPLANNABLE = (
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
    "bucket_cap_mb_list",
)
# torch.compile splits the graph by the first buckets, and never again.
COMPILED = "a compiled model is not planned for in training; give a plan, made without compiling"
# After each change of buckets there would be a pass that torch does not send.
STATIC_INSIDE_FORWARD = (
    "backward runs inside of forward, where a static graph's buckets cannot be changed; leave out "
    "static_graph"
)


class Options(Struct, frozen=True, kw_only=True):
    planner: str = "optimal"
    collective: str = AUTO
    compression: Sparse | None = None
    precision: str = EXACT
    record_steps: int = 5
    trial_steps: int = 4
    replan_when: float | None = None
    timeline: bool = False
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        find_planner(self.planner)
        _check_overlap(self.planner, overlap=parse_spec(self.planner).name not in WITHOUT_OVERLAP)
        if self.collective != AUTO:
            _check_collective(self.collective, [AUTO])
        self._check_precision()
        for name, least in (("record_steps", 1), ("trial_steps", 0)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.replan_when is not None and not self.replan_when > 0:
            raise RequestError(f"replan_when must be positive, got {self.replan_when}")
        if self.cache is not None and not isinstance(self.cache, str | os.PathLike):
            raise RequestError(f"cache must be a folder, or empty for none, got {self.cache!r}")

    def _check_kinds(self) -> None:
        """Raise RequestError, which names the field, for a value of the wrong kind."""
        of_kind: dict[str, tuple[tuple[type, ...], str]] = {
            "planner": ((str,), "the name of a planner"),
            "collective": ((str,), "the name of a collective"),
            "precision": ((str,), "the name of a precision"),
            "record_steps": ((int,), "a whole number"),
            "trial_steps": ((int,), "a whole number"),
            "replan_when": ((Real, type(None)), "a number, or None"),
        }
        for name, (kinds, what) in of_kind.items():
            found = getattr(self, name)
            if not isinstance(found, kinds):
                meant = f"; {_precision_meant(found)}" if name == "precision" else ""
                raise RequestError(f"{name} must be {what}, got {found!r}{meant}")

    def _check_precision(self) -> None:
        check_precision(self.precision)
        if self.compression is not None and (
            self.precision not in {EXACT, SPARSE} or self.collective != AUTO
        ):
            raise RequestError(
                "compression sends values and indices its own way; leave out collective and "
                f"precision={self.precision!r}"
            )
        is_rounding = self.precision in {ROUNDED, *ROUNDING_NAMES}
        if is_rounding and not collectives.is_schedule(self.collective):
            raise RequestError(
                f"precision={self.precision!r} is for schedules of ours; leave out "
                f"collective={self.collective!r}"
            )

    @property
    def rounding(self) -> RoundingName | None:
        """The format that every message is rounded to, where the user has said so."""
        return next((name for name in ROUNDING_NAMES if name == self.precision), None)


def _precision_meant(found: object) -> str:
    meant = PRECISION_OF.get(found) if isinstance(found, torch.dtype) else None
    listed = f"there are {', '.join(PRECISIONS)}"
    return listed if meant is None else f'write "{meant}" ({listed})'


def check_names(wrapper: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an option that is almost one; others are Python's to refuse."""
    for name in given:
        meant = None if name in known else closest(name, known)
        if meant is not None:
            raise TypeError(f"{wrapper} has no option {name!r}, did you mean {meant}?")


def check_caps(torch_options: Mapping[str, Any]) -> None:
    """Refuse caps that make no sense, which torch takes, or fails on without naming them."""
    caps = torch_options.get("bucket_cap_mb_list")
    if isinstance(caps, str) or not isinstance(caps, Iterable | None):
        raise RequestError(f"bucket_cap_mb_list must be a list of numbers of MiB, got {caps!r}")
    listed = [] if caps is None else list(caps)
    if caps is not None and not listed:
        raise RequestError("bucket_cap_mb_list must not be empty; leave it out for torch's default")
    one = torch_options.get("bucket_cap_mb")
    given = {"bucket_cap_mb_list": listed, "bucket_cap_mb": [] if one is None else [one]}
    for name, of_name in given.items():
        for cap in of_name:
            if not isinstance(cap, Real) or not 0 < float(cap) < float("inf"):
                raise RequestError(
                    f"{name}: bucket caps must be positive numbers of MiB, got {cap!r}"
                )


def is_whole(compression: Sparse | None) -> bool:
    """Return whether everything is selected from at once, and so travels in one bucket."""
    return compression is not None and compression.whole_model


def needs_own_group(options: Options, plan: Plan | None) -> bool:
    """Return whether some messages cannot travel on the user's group."""
    if options.compression is not None or options.rounding is not None:
        return True
    named = () if plan is None else [str(bucket.travel) for bucket in plan.buckets]
    return not {options.collective, *named} <= {AUTO, "native"}


def first_collective(options: Options, default: str) -> str:
    """Return the collective by which messages travel until there is a plan."""
    if options.rounding is not None:
        by = FOR_ROUNDED if options.collective == AUTO else options.collective
        return str(Travel(by, Compression(method=options.rounding)))
    return default if options.collective == AUTO else options.collective


def rival_collectives(options: Options, topology: Topology) -> tuple[str, ...]:
    """Return other collectives that a plan may use; if faster they are worth their thread."""
    is_free = options.collective == AUTO and options.rounding is None
    if not is_free or options.compression is not None:
        return ()
    return (FOR_SMALL_MESSAGES, FOR_TIERS) if is_tiered(topology) else (FOR_SMALL_MESSAGES,)


def is_tiered(topology: Topology) -> bool:
    return len(topology.factors) > 1


def check_whole_model(plan: object) -> None:
    if plan is not None:
        raise RequestError(
            "whole_model sends one message, and the plan has others; leave out one of them"
        )


def check_plan(plan: object, options: Options) -> None:
    """Raise unless it is a plan that a wrapper with these settings can carry out."""
    if not isinstance(plan, Plan):
        raise RequestError(f"plan must be a Plan, a Recipe or a file, got {type(plan).__name__}")
    _check_overlap(plan.planner, overlap=plan.overlap)
    for number, bucket in enumerate(plan.buckets, 1):
        _check_collective(bucket.collective)
        rounding = None if bucket.compression is None else bucket.compression.rounding
        is_plain = bucket.compression is None and bucket.collective == "native"
        may_be_dense = options.precision == SPARSE and is_plain
        if bucket.is_sparse != (options.compression is not None) and not may_be_dense:
            found = f"by {bucket.compression}" if bucket.is_sparse else "uncompressed"
            needs = "with" if options.compression is not None else "without"
            raise RequestError(
                f"the plan sends bucket {number} {found}, and the model is wrapped {needs} "
                "compression; plan for what is wrapped"
            )
        if rounding is not None and not collectives.is_schedule(bucket.collective):
            raise RequestError(
                f"the plan sends bucket {number} by {bucket.travel}, and only schedules of ours "
                "round; plan for ring"
            )
        if rounding not in _roundings(options):
            found = "as it is" if rounding is None else f"rounded to {rounding}"
            raise RequestError(
                f"the plan sends bucket {number} {found}, and the model is wrapped with "
                f"precision={options.precision!r}; plan for what is wrapped"
            )


def _roundings(options: Options) -> Collection[RoundingName | None]:
    """Return what a plan's buckets may be rounded to."""
    if options.precision == ROUNDED:
        return (None, *ROUNDING_NAMES)
    return (options.rounding,)


def _check_overlap(planner: str, *, overlap: bool) -> None:
    if not overlap:
        raise RequestError(
            f"planner {planner!r} sends nothing before backward has ended, which torch's wrapper "
            "cannot do"
        )


def _check_collective(name: str, others: Sequence[str] = ()) -> None:
    known = [*others, "native", *collectives.names("all-reduce")]
    spelt = parse_spec(name).name
    if spelt not in known or parse_travel(name).compression is not None:
        raise RequestError(f"no collective {name!r}{alternatives(spelt, known)}")


def why_unplannable(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    torch_options: Mapping[str, object],
) -> str | None:
    """Say why torch's own buckets stay; None where there can be others."""
    kinds = {(str(p.dtype), str(p.device)) for p in parameters.values()}
    names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
    lack = why_no_other_buckets()
    given = [name for name in UNPLANNABLE if torch_options.get(name) is not None]
    unknown = [name for name in unfollowed_options(torch_options) if name not in UNPLANNABLE]
    reasons = {
        f"{', '.join(given)} is given": bool(given),
        f"what {', '.join(unknown)} means for buckets is not known here": bool(unknown),
        f"torch buckets each type and device by itself, and there are {names}": len(kinds) > 1,
        "sparse gradients travel by themselves": any(modules_with_sparse_gradients(module)),
        "an optimizer runs in backward": any(map(has_optimizer_in_backward, parameters.values())),
        "no parameter has elements": not any(p.numel() for p in parameters.values()),
        lack or "": lack is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)

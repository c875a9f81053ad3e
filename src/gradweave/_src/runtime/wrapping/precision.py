"""What a wrapper's precision allows: which ways plans may take, and what cannot be rounded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradweave._src import collectives
from gradweave._src.collectives.topology import Topology
from gradweave._src.compression import (
    DEFAULT_DENSITY,
    KEEPS_ERRORS,
    ROUNDED,
    ROUNDED_TO,
    SPARSE,
    Compression,
)
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.planning import FOR_ROUNDED, FOR_TIERS
from gradweave._src.runtime.wrapping.options import AUTO, Options, first_collective, is_tiered
from gradweave._src.runtime.wrapping.parameters import modules_with_sparse_gradients
from gradweave._src.sparse.settings import GTopK, Sparse
from gradweave._src.travel import Travel, parse_travel


def sparse_settings(options: Options) -> Sparse | None:
    """Return how the largest gradients are sent; None where all of them are."""
    if options.precision == SPARSE and options.compression is None:
        return GTopK(density=DEFAULT_DENSITY)
    return options.compression


def rounded_ways(options: Options, topology: Topology) -> tuple[str, ...]:
    """Return the rounded ways that plans may choose; empty where nothing may be rounded."""
    by = options.collective
    if options.precision != ROUNDED:
        return ()
    if by == AUTO:
        by = FOR_TIERS if is_tiered(topology) else FOR_ROUNDED
    sums_copies = collectives.sums_copies(by, topology)
    to = (name for name in ROUNDED_TO if name not in KEEPS_ERRORS or not sums_copies)
    return tuple(str(Travel(by, Compression(method=name))) for name in to)


def check_ways(options: Options, plan: Plan | None, topology: Topology) -> None:
    """Raise unless messages can be rounded as the user has named, and as the plan says."""
    planned = () if plan is None else [bucket.travel for bucket in plan.buckets]
    for travel in dict.fromkeys([parse_travel(first_collective(options, "native")), *planned]):
        if travel.compression is None or travel.compression.rounding not in KEEPS_ERRORS:
            continue
        if collectives.sums_copies(travel.collective, topology):
            raise RequestError(
                f"{travel.compression} keeps what rounding drops, and by {travel.collective!r} "
                "several ranks make the same sums, so it would count twice; take ring, or bf16"
            )


def check_roundable(
    options: Options,
    module: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    torch_options: Mapping[str, Any],
) -> None:
    """Raise where precision would round gradients that cannot be rounded."""
    if options.rounding is None and options.precision != ROUNDED:
        return
    of = f"precision={options.precision!r}"
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.float32:
            raise RequestError(
                f"{of} is for gradients in float32, and {name!r} has {parameter.dtype}; leave out "
                "precision"
            )
    for name in modules_with_sparse_gradients(module):
        raise RequestError(
            f"{of} is for dense gradients, and {name!r} has sparse ones; use sparse=False there, "
            "or leave out precision"
        )
    if torch_options.get("mixed_precision") is not None:
        raise RequestError(f"{of} needs the one hook that mixed_precision has; leave out one")

"""BlueConnect: reduce-scatter tier by tier on ever smaller parts, then all-gather back.

With ranks numbered so that the innermost tier counts fastest, tier i joins the p_i ranks that
differ in digit i only. The message has one block per rank. The innermost tier cuts it first, so the
innermost digit of a rank is the most significant one of the block it ends up with.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from gradweave._src.collectives import halving, ring
from gradweave._src.collectives.schedule import (
    IntArray,
    Schedule,
    nothing,
    on_groups,
    then,
)


class Tier(NamedTuple):
    """How the groups of a tier reduce-scatter on the way in and all-gather on the way out."""

    reduce_scatter: Callable[[int], Schedule]
    all_gather: Callable[[int], Schedule]


RING = Tier(ring.reduce_scatter, ring.all_gather)
HALVING = Tier(halving.reduce_scatter, halving.all_gather)


def best_tier(ranks: int) -> Tier:
    """Halving for powers of two, otherwise the ring (the paper's Eq. 3)."""
    return HALVING if ranks & (ranks - 1) == 0 else RING


def all_reduce(factors: Sequence[int], tiers: Sequence[Tier] | None = None) -> Schedule:
    """``factors`` innermost first."""
    ranks = prod(factors)
    if ranks == 1:
        return nothing(1)
    chosen = tiers or [best_tier(size) for size in factors]
    sized = list(enumerate(zip(factors, chosen, strict=True)))
    inwards = [stage(factors, tier, by.reduce_scatter(size)) for tier, (size, by) in sized]
    outwards = [stage(factors, tier, by.all_gather(size)) for tier, (size, by) in reversed(sized)]
    return then(*inwards, *outwards)


def stage(factors: Sequence[int], tier: int, part: Schedule) -> Schedule:
    """One tier's reduce-scatter or all-gather in all its groups at once."""
    members, edges = groups(factors, tier)
    ranks = prod(factors)
    return on_groups(part, members, edges, ranks=ranks, blocks=ranks)


def groups(factors: Sequence[int], tier: int) -> tuple[IntArray, IntArray]:
    """The groups of a tier, one a row: their ranks, and the edges of their blocks."""
    ranks, inner, size = prod(factors), prod(factors[:tier]), factors[tier]
    rank = np.arange(ranks)
    leaders = rank[rank // inner % size == 0]
    members = leaders[:, None] + inner * np.arange(size)[None, :]
    held = ranks // inner  # blocks that a rank of this tier still works on
    edges = _first_block(leaders, factors[:tier], ranks)[:, None] + np.arange(size + 1) * (
        held // size
    )
    return members, edges


def _first_block(rank: IntArray, inner_factors: Sequence[int], blocks: int) -> IntArray:
    """Where the part begins that the inner tiers have left to a rank."""
    first = np.zeros_like(rank)
    for size in inner_factors:
        blocks //= size
        first += rank % size * blocks
        rank = rank // size
    return first

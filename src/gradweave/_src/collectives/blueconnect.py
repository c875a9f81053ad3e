"""BlueConnect: reduce-scatter tier by tier on ever smaller parts, then all-gather back.

With ranks numbered so that the innermost tier counts fastest, tier i joins the p_i ranks that
differ in digit i only. The message has one block per rank. The innermost tier cuts it first, so the
innermost digit of a rank is the most significant one of the block it ends up with.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from gradweave._src.collectives import halving, pat, ring
from gradweave._src.collectives.alike import Alike, Axis, Halves, Hop, Stage, placed
from gradweave._src.collectives.schedule import (
    IntArray,
    Schedule,
    block_by_block,
    nothing,
    on_groups,
    then,
)
from gradweave._src.errors import RequestError


class Tier(NamedTuple):
    """How the groups of a tier reduce-scatter on the way in and all-gather on the way out."""

    reduce_scatter: Callable[[int], Schedule]
    all_gather: Callable[[int], Schedule]
    halves: Callable[[int], list[Halves]]  # the same, written down once for all ranks


def _in_pairs(ranks: int) -> list[Halves]:
    """Return halving as stages of pairs, each at half the distance; for powers of two only."""
    if ranks & (ranks - 1):
        raise RequestError(
            f"{ranks} ranks by halving-doubling do not all do the same, for they are no power of "
            "two; take ring or pat"
        )
    one_round = Alike(
        members=2, rounds=1, hop=lambda _: Hop(1, np.array([0])), add=False, sends_once=True
    )
    strides = [1 << bit for bit in reversed(range(ranks.bit_length() - 1))]
    return [Halves(Axis(stride, 2), one_round.backwards(), one_round) for stride in strides]


RING = Tier(ring.reduce_scatter, ring.all_gather, ring.halves)
HALVING = Tier(halving.reduce_scatter, halving.all_gather, _in_pairs)
PAT = Tier(pat.reduce_scatter, pat.all_gather, pat.halves)


def best_tier(ranks: int) -> Tier:
    """Choose halving for powers of two, otherwise the ring (the paper's Eq. 3)."""
    return HALVING if ranks & (ranks - 1) == 0 else RING


def all_reduce(factors: Sequence[int], tiers: Sequence[Tier] | None = None) -> Schedule:
    """Build the all-reduce over tiers, whose ``factors`` are given innermost first."""
    if prod(factors) == 1:
        return nothing(1)
    return then(_inwards(factors, tiers), _outwards(factors, tiers))


def reduce_scatter(
    factors: Sequence[int], order: Sequence[int], tiers: Sequence[Tier] | None = None
) -> Schedule:
    """Build the way in; the rank at place p is ``order[p]``, and ends with its own block."""
    return _owned(_inwards(factors, tiers), factors, np.array(order))


def all_gather(
    factors: Sequence[int], order: Sequence[int], tiers: Sequence[Tier] | None = None
) -> Schedule:
    """Build the way out; the rank at place p is ``order[p]``, and begins with its own block."""
    return _owned(_outwards(factors, tiers), factors, np.array(order))


def stages(factors: Sequence[int], tiers: Sequence[Tier]) -> tuple[list[Stage], list[Stage]]:
    """Return the stages of the way in and of the way out, written down once for all ranks."""
    halves: list[Halves] = []
    for tier, (size, by) in enumerate(zip(factors, tiers, strict=True)):
        halves += placed(by.halves(size), prod(factors[:tier]))
    return (
        [Stage(half.axis, half.scattering) for half in halves],
        [Stage(half.axis, half.gathering) for half in reversed(halves)],
    )


def _inwards(factors: Sequence[int], tiers: Sequence[Tier] | None) -> Schedule:
    return then(
        *(
            stage(factors, tier, by.reduce_scatter(size))
            for tier, size, by in _sized(factors, tiers)
        )
    )


def _outwards(factors: Sequence[int], tiers: Sequence[Tier] | None) -> Schedule:
    return then(
        *(
            stage(factors, tier, by.all_gather(size))
            for tier, size, by in reversed(_sized(factors, tiers))
        )
    )


def _sized(factors: Sequence[int], tiers: Sequence[Tier] | None) -> list[tuple[int, int, Tier]]:
    chosen = tiers or [best_tier(size) for size in factors]
    return [(tier, size, chosen[tier]) for tier, size in enumerate(factors)]


def _owned(part: Schedule, factors: Sequence[int], order: IntArray) -> Schedule:
    """Rename ranks and blocks so that each rank's own block has its number.

    What was one run of blocks then lies all over the message, so that each block travels by itself.
    """
    owner = np.empty_like(order)
    owner[_first_block(np.arange(len(order)), factors, len(order))] = order
    return block_by_block(part, ranks=order, blocks=owner)


def stage(factors: Sequence[int], tier: int, part: Schedule) -> Schedule:
    """Build one tier's reduce-scatter or all-gather in all its groups at once."""
    members, edges = groups(factors, tier)
    ranks = prod(factors)
    return on_groups(part, members, edges, ranks=ranks, blocks=ranks)


def groups(factors: Sequence[int], tier: int) -> tuple[IntArray, IntArray]:
    """Return the groups of a tier, one a row: their ranks, and the edges of their blocks."""
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
    """Return where the part begins that the inner tiers have left to a rank."""
    first = np.zeros_like(rank)
    for size in inner_factors:
        blocks //= size
        first += rank % size * blocks
        rank = rank // size
    return first

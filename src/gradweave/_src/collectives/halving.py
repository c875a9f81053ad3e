"""Recursive halving and doubling: the ring's bytes in ceil(log2 N) rounds, for any N."""

import numpy as np

from gradweave._src.collectives.schedule import (
    Round,
    Schedule,
    around_the_end,
    backwards,
    then,
    transfers,
)


def reduce_scatter(ranks: int) -> Schedule:
    """Leave the sum of block r on rank r; every rank sends and receives N-1 blocks.

    In a power of two, partners at half the distance each time swap the half of their blocks that
    the other one is to own. Otherwise nobody has one partner: see ``_around``.
    """
    if ranks & (ranks - 1) == 0:
        return _by_partners(ranks)
    return _around(ranks)


def all_gather(ranks: int) -> Schedule:
    """Gather all blocks; rank r begins with block r, and what ranks have doubles each round."""
    return backwards(reduce_scatter(ranks), add=False)


def all_reduce(ranks: int) -> Schedule:
    return then(reduce_scatter(ranks), all_gather(ranks))


def _by_partners(ranks: int) -> Schedule:
    def round_(number: int) -> Round:
        half = ranks >> (number + 1)
        rank = np.arange(ranks)
        partner = rank ^ half
        kept_by_partner = partner - partner % half
        return transfers(rank, partner, kept_by_partner, kept_by_partner + half, add=True)

    return Schedule(ranks, ranks, ranks.bit_length() - 1, round_)


def _around(ranks: int) -> Schedule:
    """Reduce-scatter on a circle, for any number of ranks.

    See Träff: *Optimal, non-pipelined reduce-scatter and allreduce algorithms*. Rank r works on the
    s blocks r, r + 1, … modulo N, at first on all N. In a round it keeps the first h = ceil(s/2) of
    them and sends the others to rank r + h, which keeps just these.
    """
    kept = [ranks]  # after each round, of the N blocks that a rank begins with
    while kept[-1] > 1:
        kept.append((kept[-1] + 1) // 2)

    def round_(number: int) -> Round:
        worked_on, half = kept[number], kept[number + 1]
        target = (np.arange(ranks) + half) % ranks
        return around_the_end(
            np.arange(ranks), target, target, worked_on - half, blocks=ranks, add=True
        )

    return Schedule(ranks, ranks, len(kept) - 1, round_)

"""PAT, parallel aggregated trees: the ring's bytes in ceil(log2 N) rounds, for any N.

This is NCCL's algorithm of that name (S. Jeaugey, "PAT: a new algorithm for all-gather and
reduce-scatter operations at scale", arXiv 2506.20252) where its buffers are large enough: every
part goes down a binomial tree whose root is its owner, all trees are the same but for where they
begin, and in a round every rank has one peer, to which it sends the parts of all trees together.
Far peers come first, while there is little to send. The reduce-scatter is the all-gather backwards.
No rank is left over where N is no power of two: its branches of the trees are not there.
"""

import numpy as np

from gradweave._src.collectives.alike import Alike, Axis, Halves, Hop, spread
from gradweave._src.collectives.schedule import Schedule, then


def all_gather(ranks: int) -> Schedule:
    """Build an all-gather, where rank r begins with block r."""
    return spread(_down_the_trees(ranks))


def reduce_scatter(ranks: int) -> Schedule:
    """Build a reduce-scatter, where rank r ends with the sum of block r."""
    return spread(_down_the_trees(ranks).backwards())


def all_reduce(ranks: int) -> Schedule:
    """Build an all-reduce of 2 ceil(log2 N) rounds."""
    return then(reduce_scatter(ranks), all_gather(ranks))


def halves(ranks: int) -> list[Halves]:
    gathering = _down_the_trees(ranks)
    return [Halves(Axis(1, ranks), gathering.backwards(), gathering)]


def _down_the_trees(ranks: int) -> Alike:
    rounds = (ranks - 1).bit_length()

    def hop(number: int) -> Hop:
        ahead = 1 << (rounds - 1 - number)
        # Ranks that have a part stand so many places from its owner; none sends it past the owner.
        behind = np.arange(0, ranks - ahead, 2 * ahead)
        return Hop(ahead, -behind)

    return Alike(members=ranks, rounds=rounds, hop=hop, add=False, sends_once=False)

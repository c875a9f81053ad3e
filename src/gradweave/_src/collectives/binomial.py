"""A binomial tree in which neighbours meet first, for a reduce up and a broadcast down.

The gTop-k paper's Algorithm 3 merges in this order. Sums are the same up any tree; what is dropped
between merges is not.
"""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, backwards, then, transfers


def reduce(ranks: int) -> Schedule:
    """Reduce to rank 0 in ceil(log2 N) rounds of the whole message."""

    def round_(number: int) -> Round:
        source = np.arange(1 << number, ranks, 2 << number)
        return transfers(source, source - (1 << number), 0, 1, add=True)

    return Schedule(ranks, 1, (ranks - 1).bit_length(), round_)


def all_reduce(ranks: int) -> Schedule:
    return then(reduce(ranks), backwards(reduce(ranks), add=False))

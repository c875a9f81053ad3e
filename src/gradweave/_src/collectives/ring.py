"""Around a ring: every rank sends to the next one, 1/N of the message in each round."""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, then, transfers


def reduce_scatter(ranks: int) -> Schedule:
    """N-1 rounds; rank r ends with the sum of block r."""
    return _around(ranks, ahead=-1, add=True)


def all_gather(ranks: int) -> Schedule:
    """N-1 rounds; rank r begins with block r.

    In the direction of the reduce-scatter, not backwards: connections that have just been busy are
    up to speed.
    """
    return _around(ranks, ahead=0, add=False)


def all_reduce(ranks: int) -> Schedule:
    """2 (N-1) rounds of 1/N of the message each."""
    return then(reduce_scatter(ranks), all_gather(ranks))


def _around(ranks: int, *, ahead: int, add: bool) -> Schedule:
    """Rank r begins with block r + ``ahead`` and then passes on what it has received last."""

    def round_(number: int) -> Round:
        source = np.arange(ranks)
        block = (source + ahead - number) % ranks
        return transfers(source, (source + 1) % ranks, block, block + 1, add=add)

    return Schedule(ranks, ranks, ranks - 1, round_)

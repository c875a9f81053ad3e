"""Minimum spanning (binomial) tree: everybody who has the message passes it on."""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, backwards, then, transfers


def broadcast(ranks: int) -> Schedule:
    """Broadcast from rank 0 in ceil(log N) rounds of the whole message."""

    def round_(number: int) -> Round:
        source = np.arange(min(1 << number, ranks - (1 << number)))
        return transfers(source, source + (1 << number), 0, 1, add=False)

    return Schedule(ranks, 1, (ranks - 1).bit_length(), round_)


def reduce(ranks: int) -> Schedule:
    """Reduce to rank 0, which is the broadcast backwards."""
    return backwards(broadcast(ranks), add=True)


def all_reduce(ranks: int) -> Schedule:
    return then(reduce(ranks), broadcast(ranks))

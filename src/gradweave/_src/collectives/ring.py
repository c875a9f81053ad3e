"""Around a ring: every rank sends to the next one, 1/N of the message in each round."""

import numpy as np

from gradweave._src.collectives.alike import Alike, Axis, Halves, Hop, spread
from gradweave._src.collectives.schedule import Schedule, then


def reduce_scatter(ranks: int) -> Schedule:
    """Leave the sum of block r on rank r, in N-1 rounds."""
    return spread(_around(ranks, first=-1, add=True))


def all_gather(ranks: int) -> Schedule:
    """Gather all blocks in N-1 rounds; rank r begins with block r.

    Blocks go in the direction of the reduce-scatter, not backwards: connections that have just been
    busy are up to speed.
    """
    return spread(_around(ranks, first=0, add=False))


def all_reduce(ranks: int) -> Schedule:
    """Build an all-reduce of 2 (N-1) rounds, each of 1/N of the message."""
    return then(reduce_scatter(ranks), all_gather(ranks))


def halves(ranks: int) -> list[Halves]:
    return [
        Halves(
            Axis(1, ranks),
            _around(ranks, first=-1, add=True),
            _around(ranks, first=0, add=False),
        )
    ]


def _around(ranks: int, *, first: int, add: bool) -> Alike:
    """Let each rank send part ``first``, then always pass on what it has received last."""
    return Alike(
        members=ranks,
        rounds=ranks - 1,
        hop=lambda number: Hop(1, np.array([first - number])),
        add=add,
        sends_once=True,
    )

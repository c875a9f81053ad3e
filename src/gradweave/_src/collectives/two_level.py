"""Two-level all-reduce: one master per group speaks for it."""

import numpy as np

from gradweave._src.collectives import exchange, ring
from gradweave._src.collectives.blueconnect import best_tier
from gradweave._src.collectives.schedule import Schedule, on_groups, then


def all_reduce(local: int, masters: int) -> Schedule:
    """Reduce to the first rank of each group, all-reduce among these, broadcast back.

    Ranks are numbered so that a group's ranks follow each other. Inside a group a reduce is a
    reduce-scatter by ring and a gather, a broadcast the reverse of it (the BlueConnect paper's
    Eq. 4).
    """
    ranks = local * masters
    blocks = ranks  # so that the parts of every step are whole blocks
    members = np.arange(ranks).reshape(masters, local)
    inside = (np.arange(local + 1) * masters)[None, :].repeat(masters, axis=0)
    between = (np.arange(masters + 1) * local)[None, :]
    return then(
        on_groups(_reduce(local), members, inside, ranks=ranks, blocks=blocks),
        on_groups(_among_masters(masters), members[:, :1].T, between, ranks=ranks, blocks=blocks),
        on_groups(exchange.broadcast(local), members, inside, ranks=ranks, blocks=blocks),
    )


def _reduce(local: int) -> Schedule:
    return then(ring.reduce_scatter(local), exchange.gather(local))


def _among_masters(masters: int) -> Schedule:
    tier = best_tier(masters)
    return then(tier.reduce_scatter(masters), tier.all_gather(masters))

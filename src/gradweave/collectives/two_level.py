"""Two-level all-reduce: one master per group speaks for it."""

from collections.abc import Callable

import numpy as np

from gradweave.collectives import exchange, halving, ring
from gradweave.collectives.schedule import Schedule, on_groups, then


def all_reduce(local: int, masters: int) -> Schedule:
    """Reduce to the first rank of each group, all-reduce among these, broadcast back.

    Ranks are numbered so that a group's ranks follow each other.
    """
    ranks = local * masters
    blocks = ranks  # so that the parts of every step are whole blocks
    members = np.arange(ranks).reshape(masters, local)
    inside = (np.arange(local + 1) * masters)[None, :].repeat(masters, axis=0)
    between = (np.arange(masters + 1) * local)[None, :]
    return then(
        on_groups(exchange.reduce(local), members, inside, ranks=ranks, blocks=blocks),
        on_groups(_among(masters)(masters), members[:, :1].T, between, ranks=ranks, blocks=blocks),
        on_groups(exchange.broadcast(local), members, inside, ranks=ranks, blocks=blocks),
    )


def _among(masters: int) -> Callable[[int], Schedule]:
    """Halving for powers of two, otherwise the ring (the BlueConnect paper's Eq. 3)."""
    return halving.all_reduce if masters & (masters - 1) == 0 else ring.all_reduce

"""Balanced binary trees: a single one, and two at once that share the work.

In a single tree half of the ranks are leaves, which only send on the way up and only receive on the
way down. Two trees, each with its half of the message and with one's leaves inside the other, keep
every rank busy in both directions (Sanders, Speck and Träff, 2009).
"""

import numpy as np

from gradweave._src.collectives.schedule import (
    IntArray,
    Round,
    Schedule,
    beside,
    joined,
    renamed,
    transfers,
)
from gradweave._src.costs.all_reduce import DOUBLE_TREE_CHUNKS


def all_reduce(ranks: int) -> Schedule:
    """Send the whole message up to the root and down again."""
    return _up_and_down(in_order_parents(ranks), chunks=1)


def double_all_reduce(ranks: int, chunks: int = DOUBLE_TREE_CHUNKS) -> Schedule:
    """Send each half of the message through its own tree, in chunks."""
    one = _up_and_down(in_order_parents(ranks), chunks=chunks)
    return beside(one, renamed(one, (np.arange(ranks) + 1) % ranks))


def in_order_parents(ranks: int) -> IntArray:
    """Return each rank's parent, -1 at the root, in a balanced tree numbered from left to right.

    All even ranks are leaves, so a shift by one rank makes the leaves inner ranks.
    """
    parents = np.full(ranks, -1, dtype=np.int64)

    def attach(first: int, count: int, parent: int) -> None:
        if count:
            left = (1 << (count.bit_length() - 1)) - 1
            root = first + left
            parents[root] = parent
            attach(first, left, root)
            attach(root + 1, count - left - 1, root)

    attach(0, ranks, -1)
    return parents


def _up_and_down(parents: IntArray, *, chunks: int) -> Schedule:
    depth = _depths(parents)
    height = int(depth.max())

    def round_(number: int) -> Round:
        up = number - (height - depth)  # the chunk each rank would send to its parent now
        down = number - (height + depth - 1)  # the chunk each rank would get from its parent now
        children = parents >= 0
        sends = np.flatnonzero(children & (up >= 0) & (up < chunks))
        gets = np.flatnonzero(children & (down >= 0) & (down < chunks))
        return joined(
            [
                transfers(sends, parents[sends], up[sends], up[sends] + 1, add=True),
                transfers(parents[gets], gets, down[gets], down[gets] + 1, add=False),
            ]
        )

    rounds = 2 * height + chunks - 1 if height else 0
    return Schedule(len(parents), chunks, rounds, round_)


def _depths(parents: IntArray) -> IntArray:
    depth = np.zeros(len(parents), dtype=np.int64)
    above = parents
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    return depth

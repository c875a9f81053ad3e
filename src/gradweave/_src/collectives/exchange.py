"""Bidirectional exchange: long messages are scattered first, so that everybody can help."""

import numpy as np

from gradweave._src.collectives import halving, ring
from gradweave._src.collectives.schedule import Round, Schedule, backwards, then, transfers


def scatter(ranks: int) -> Schedule:
    """Scatter from rank 0 down a tree, halving what is left; rank r ends with block r."""
    rounds = (ranks - 1).bit_length()

    def round_(number: int) -> Round:
        size = 1 << (rounds - number)  # ranks 0, size, 2 size, … have their part by now
        source = np.arange(0, ranks, size)
        target = source + size // 2
        exists = target < ranks
        source, target = source[exists], target[exists]
        return transfers(source, target, target, np.minimum(target + size // 2, ranks), add=False)

    return Schedule(ranks, ranks, rounds, round_)


def gather(ranks: int) -> Schedule:
    """Gather to rank 0, which is the scatter backwards."""
    return backwards(scatter(ranks), add=False)


def broadcast(ranks: int) -> Schedule:
    """Broadcast by a scatter down the tree and an all-gather around the ring."""
    return then(scatter(ranks), ring.all_gather(ranks))


def reduce(ranks: int) -> Schedule:
    """Reduce by a reduce-scatter by halving, whose sums are then gathered at rank 0."""
    return then(halving.reduce_scatter(ranks), gather(ranks))


def all_reduce(ranks: int) -> Schedule:
    return halving.all_reduce(ranks)

"""Recursive doubling: partners at distance 1, 2, 4, … swap everything they have."""

import numpy as np

from gradweave._src.collectives.folding import Folding
from gradweave._src.collectives.schedule import Round, Schedule, transfers


def all_reduce(ranks: int) -> Schedule:
    """All-reduce in floor(log2 N) whole messages, and two more where N is no power of two."""
    folding = Folding(ranks)
    folded = folding.pairs > 0
    doublings = folding.cores.bit_length() - 1

    def round_(number: int) -> Round:
        if folded and number == 0:
            return transfers(folding.evens + 1, folding.evens, 0, 1, add=True)
        step = number - folded
        if step == doublings:
            return transfers(folding.evens, folding.evens + 1, 0, 1, add=False)
        core = np.arange(folding.cores)
        partner = core ^ (1 << step)
        return transfers(folding.rank(core), folding.rank(partner), 0, 1, add=True)

    return Schedule(ranks, 1, doublings + 2 * folded, round_)

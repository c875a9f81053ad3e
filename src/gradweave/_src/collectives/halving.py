"""Recursive halving and doubling: the ring's bytes in log N rounds."""

import numpy as np

from gradweave._src.collectives.folding import Folding
from gradweave._src.collectives.schedule import Round, Schedule, backwards, then, transfers


def reduce_scatter(ranks: int) -> Schedule:
    """Rank r ends with the sum of block r.

    Partners at half the distance each time swap the half of their blocks that the other one is to
    own. Where the ranks are no power of two, one round before and one after take the others in.
    """
    folding = Folding(ranks)
    folded = folding.pairs > 0
    halvings = folding.cores.bit_length() - 1

    def round_(number: int) -> Round:
        if folded and number == 0:
            return transfers(folding.evens + 1, folding.evens, 0, ranks, add=True)
        step = number - folded
        if step == halvings:
            odd = folding.evens + 1
            return transfers(folding.evens, odd, odd, odd + 1, add=False)
        half = folding.cores >> (step + 1)
        core = np.arange(folding.cores)
        partner = core ^ half
        kept_by_partner = partner - partner % half
        return transfers(
            folding.rank(core),
            folding.rank(partner),
            folding.rank(kept_by_partner),
            folding.rank(kept_by_partner + half),
            add=True,
        )

    return Schedule(ranks, ranks, halvings + 2 * folded, round_)


def all_gather(ranks: int) -> Schedule:
    """Rank r begins with block r; what everybody has doubles in each round."""
    return backwards(reduce_scatter(ranks), add=False)


def all_reduce(ranks: int) -> Schedule:
    return then(reduce_scatter(ranks), all_gather(ranks))

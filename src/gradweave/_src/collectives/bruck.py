"""Bruck's all-gather: everyone's block to everyone in ceil(log2 N) rounds, for any N.

Before round j a rank has the blocks of ranks r, r + 1, … up to 2^j of them, modulo N. It receives
the next ones from rank r + 2^j, the last time only as many as are missing. Exchanges of sparse
gradients go by it: there a block is one rank's vector.
"""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, around_the_end


def all_gather(ranks: int) -> Schedule:
    """Gather all blocks on all ranks, of which rank r begins with block r."""

    def round_(number: int) -> Round:
        distance = 1 << number
        source = np.arange(ranks)
        target = (source - distance) % ranks
        count = min(distance, ranks - distance)
        return around_the_end(source, target, source, count, blocks=ranks, add=False)

    return Schedule(ranks, ranks, (ranks - 1).bit_length(), round_)

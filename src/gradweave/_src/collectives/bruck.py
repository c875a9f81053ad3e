"""Bruck's all-gather: everyone's block to everyone in ceil(log2 N) rounds, for any N.

Before round j a rank has the blocks of ranks r, r + 1, … up to 2^j of them, modulo N. It receives
the next ones from rank r + 2^j, the last time only as many as are missing. Exchanges of sparse
gradients go by it: there a block is one rank's vector.
"""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, joined, transfers


def all_gather(ranks: int) -> Schedule:
    """Rank r begins with block r. Blocks around the end of the message are two transfers."""

    def round_(number: int) -> Round:
        distance = 1 << number
        source = np.arange(ranks)
        target = (source - distance) % ranks
        last = source + min(distance, ranks - distance)
        around = last > ranks
        return joined(
            [
                transfers(source, target, source, np.minimum(last, ranks), add=False),
                transfers(source[around], target[around], 0, last[around] - ranks, add=False),
            ]
        )

    return Schedule(ranks, ranks, (ranks - 1).bit_length(), round_)

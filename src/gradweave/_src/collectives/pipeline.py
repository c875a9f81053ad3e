"""Linear pipeline: blocks pass along a chain; a rank sends one while it receives the next.

The cost hardly grows with the number of ranks: the chain is as fast as one link once it is filled.
"""

import numpy as np

from gradweave._src.collectives.schedule import (
    IntArray,
    Round,
    Schedule,
    backwards,
    joined,
    nothing,
    transfers,
)


def broadcast(ranks: int, blocks: int) -> Schedule:
    """Broadcast along the chain from rank 0 to rank N-1, in N-2 + blocks rounds."""

    def round_(number: int) -> Round:
        source = np.arange(ranks - 1)
        return _sent(source, source + 1, number - source, blocks, add=False)

    return Schedule(ranks, blocks, ranks - 2 + blocks if ranks > 1 else 0, round_)


def reduce(ranks: int, blocks: int) -> Schedule:
    """Reduce to rank 0, which is the broadcast backwards."""
    return backwards(broadcast(ranks, blocks), add=True)


def all_reduce(ranks: int, blocks: int) -> Schedule:
    """Reduce and broadcast in one, filling the pipe once.

    Every block goes around the ring: from rank 0 to N-1, which has the sum then, on to rank 0 and,
    when rank 0 has sent all its own blocks, on to rank N-2. A rank sends at most one block in a
    round and receives at most one. The paper's Fig. 2 also sends the sum back to rank N-1, which
    computed it; without that hop we need one round less: 8 instead of 9 for 3 ranks and 4 blocks.
    """
    if ranks == 1:
        return nothing(1, blocks)
    begins = max(blocks, ranks)  # when rank 0 has nothing of its own left and holds the first sum

    def round_(number: int) -> Round:
        everyone = np.arange(ranks)
        before_last = everyone[:-1]
        adding = _sent(before_last, before_last + 1, number - before_last, blocks, add=True)
        closing = _sent(everyone[-1:], everyone[:1], number - everyone[-1:], blocks, add=False)
        passing = everyone[: ranks - 2]
        spreading = _sent(passing, passing + 1, number - begins - passing, blocks, add=False)
        return joined([adding, closing, spreading])

    last_spread = begins + ranks - 3 if ranks > 2 else ranks - 1  # noqa: PLR2004
    return Schedule(ranks, blocks, last_spread + blocks, round_)


def _sent(source: IntArray, target: IntArray, block: IntArray, blocks: int, *, add: bool) -> Round:
    """Return the transfers of one round, without those of blocks that do not exist."""
    exists = (block >= 0) & (block < blocks)
    return transfers(source[exists], target[exists], block[exists], block[exists] + 1, add=add)

"""Who sends to whom: an exchange as one rank's list of steps, for any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from gradweave.collectives.folding import Folding


class Meaning(Enum):
    """What ranks do with what arrives."""

    GATHER = "the receiver puts it beside what it has"
    HAND_OVER = "the receiver merges it with its own; the sender is done until it gets the result"
    SWAP = "both send, and both compute the same merged vector"
    RESULT = "the receiver takes it as it is"


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part in one round."""

    round: int
    meaning: Meaning
    to: int | None = None
    source: int | None = None
    vectors: int = 1  # travel in one message


# (rank, ranks) -> steps, in the order of their rounds
Steps = Callable[[int, int], list[Step]]


def all_gather(rank: int, ranks: int) -> list[Step]:
    """Everyone's vector to everyone: ceil(log2 P) rounds, P - 1 vectors to each rank (Bruck).

    Before round j a rank has the vectors of ranks r, r + 1, … up to 2^j of them, modulo P. It
    receives the next ones from rank r + 2^j, the last time only as many as are missing.
    """
    return [
        Step(
            number,
            Meaning.GATHER,
            to=(rank - (1 << number)) % ranks,
            source=(rank + (1 << number)) % ranks,
            vectors=min(1 << number, ranks - (1 << number)),
        )
        for number in range(_doublings(ranks))
    ]


def tree(rank: int, ranks: int) -> list[Step]:
    """Up a binomial tree to rank 0, and down again: 2 ceil(log2 P) rounds (Algorithm 3)."""
    doublings = _doublings(ranks)
    up, down = [], []
    for number in range(doublings):
        distance = 1 << number
        back = 2 * doublings - 1 - number
        if rank % (2 * distance) == distance:
            up.append(Step(number, Meaning.HAND_OVER, to=rank - distance))
            down.append(Step(back, Meaning.RESULT, source=rank - distance))
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            up.append(Step(number, Meaning.HAND_OVER, source=rank + distance))
            down.append(Step(back, Meaning.RESULT, to=rank + distance))
    return up + down[::-1]


def butterfly(rank: int, ranks: int) -> list[Step]:
    """Partners at distance 1, 2, 4, … swap: log2 P rounds.

    Where P is no power of two, neighbours act as one, which takes two rounds more (``Folding``).
    """
    folding = Folding(ranks)
    folded = int(folding.pairs > 0)
    swaps = folding.cores.bit_length() - 1
    if rank < 2 * folding.pairs and rank % 2:
        return [
            Step(0, Meaning.HAND_OVER, to=rank - 1),
            Step(swaps + 1, Meaning.RESULT, source=rank - 1),
        ]
    core = rank - min(rank // 2, folding.pairs)
    steps = []
    for number in range(swaps):
        other = core ^ (1 << number)
        partner = other + min(other, folding.pairs)
        steps.append(Step(number + folded, Meaning.SWAP, to=partner, source=partner))
    if rank < 2 * folding.pairs:
        steps.insert(0, Step(0, Meaning.HAND_OVER, source=rank + 1))
        steps.append(Step(swaps + 1, Meaning.RESULT, to=rank + 1))
    return steps


def _doublings(ranks: int) -> int:
    """ceil(log2 P)"""
    return (ranks - 1).bit_length()

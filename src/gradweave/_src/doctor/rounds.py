"""Who sends to whom, and when: pure functions of who is there."""

from collections.abc import Sequence
from math import ceil

# What a pair takes in one direction, and what all pairs may take. Where that is not enough, several
# pairs that share no host send at once.
PAIR_S = 0.09
ALL_PAIRS_S = 15.0
# So many rounds in which all send at once are enough, even if not all pairs of a large cluster
# meet.
MOST_ROUNDS_TOGETHER = 31

Pair = tuple[int, int]  # sender, receiver


def matchings(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of pairs in which everybody meets everybody once, by the circle method.

    No two pairs of a round share a member. Of an odd number, one member has nobody in each round.
    """
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append([(a, b) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def rounds_alone(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of all pairs in both directions, one at a time as long as that is quick."""
    at_once = max(1, ceil(len(members) * (len(members) - 1) * PAIR_S / ALL_PAIRS_S))
    found = []
    for pairs in matchings(members):
        for begin in range(0, len(pairs), at_once):
            turn = pairs[begin : begin + at_once]
            found += [turn, [(b, a) for a, b in turn]]
    return found


def rounds_together(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which every host sends to another and receives from it, all at once.

    Hosts go by pairs and not round a ring: between two racks a ring sends little, and every ring of
    four hosts looks alike from the outside.
    """
    everybody = [
        [pair for a, b in pairs for pair in ((a, b), (b, a))] for pairs in matchings(members)
    ]
    step = ceil(len(everybody) / MOST_ROUNDS_TOGETHER) if everybody else 1
    return everybody[::step]

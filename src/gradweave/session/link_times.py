"""Whose link is slow: what a byte takes on each, from bursts between pairs of ranks."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from msgspec import Struct


class Transfer(Struct, frozen=True, kw_only=True):
    """What a byte took in one burst of messages."""

    part: int  # of all bursts; some of them make one value of each link
    sender: int
    receiver: int
    s_per_byte: float


def s_per_byte(arrived_s: Sequence[float], nbytes: int) -> float:
    """Of messages of so many bytes that follow each other, from when each of them was there.

    The median over all pairs of them: a host that looks late at some of them does not count.
    """
    pairs = combinations(enumerate(arrived_s), 2)
    return median((late_s - early_s) / (j - i) for (i, early_s), (j, late_s) in pairs) / nbytes


def link_times(transfers: Iterable[Transfer]) -> dict[int, list[float]]:
    """What a byte takes on the link of each rank, in its slower direction, part by part.

    A burst is as slow as the slower link of two, so that of a rank's bursts the fastest tells what
    its own link can do.
    """
    fastest: dict[int, dict[tuple[int, bool], float]] = {}  # by rank, then part and direction
    for transfer in transfers:
        for rank, is_sent in ((transfer.sender, True), (transfer.receiver, False)):
            of_rank = fastest.setdefault(rank, {})
            key = (transfer.part, is_sent)
            of_rank[key] = min(transfer.s_per_byte, of_rank.get(key, transfer.s_per_byte))
    return {
        rank: [
            max(taken for (of_part, _), taken in of_rank.items() if of_part == part)
            for part in sorted({part for part, _ in of_rank})
        ]
        for rank, of_rank in sorted(fastest.items())
    }

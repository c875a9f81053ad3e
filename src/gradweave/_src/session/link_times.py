"""Whose link is slow: what a byte takes on each, from bursts between pairs of ranks."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from msgspec import Struct


class Transfer(Struct, frozen=True, kw_only=True):
    """What a byte took in one burst of messages."""

    part: int  # bursts of one part make one value of each link
    sender: int
    receiver: int
    s_per_byte: float


def s_per_byte(arrived_s: Sequence[float], nbytes: int) -> float:
    """Return what a byte took, from when each of some messages in a row had arrived.

    It is the median over all pairs of them, which does not change if the host looks late at some.
    """
    pairs = combinations(enumerate(arrived_s), 2)
    return median((late_s - early_s) / (j - i) for (i, early_s), (j, late_s) in pairs) / nbytes


def link_times(transfers: Iterable[Transfer]) -> dict[int, list[float]]:
    """Return what a byte takes on each rank's link, in its slower direction, part by part.

    A burst is as slow as the slower of its two links, so a rank's faster bursts tell what its own
    link can do. The fastest one does not count: a host that looks late at the first messages of a
    burst sees it shorter than it was.
    """
    taken: dict[int, dict[int, dict[bool, list[float]]]] = {}  # by rank, part, and whether it sent
    for one in transfers:
        for rank, has_sent in ((one.sender, True), (one.receiver, False)):
            of_part = taken.setdefault(rank, {}).setdefault(one.part, {})
            of_part.setdefault(has_sent, []).append(one.s_per_byte)
    return {
        rank: [max(map(_of_the_faster, of_part.values())) for _, of_part in sorted(parts.items())]
        for rank, parts in sorted(taken.items())
    }


def _of_the_faster(bursts: Sequence[float]) -> float:
    """Return the time at the first tercile, which one slow peer of two cannot raise."""
    return sorted(bursts)[(len(bursts) - 1) // 3]

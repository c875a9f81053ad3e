"""Which hosts and links are slow, from rates alone: pure functions over pairs of members.

A member is only ever compared with others of its kind, so a network that is slow everywhere has
nothing slow in it. Of three members two can be told from the third; of two members, only one
direction from the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import median

from msgspec import Struct

from gradweave._src.doctor.rounds import Pair

# A rate below this share of what is expected is slow. Cards that run at the next lower speed of
# their kind reach 0.4 (10 of 25 Gbit/s) or a tenth. Doubtful rates are measured again, so chance
# hardly counts.
SLOW = 0.6
DOUBTFUL = 0.75
# Shares of a pair's rate alone that are left when all send. Two hosts on one link leave each other
# half; where each host has its own link, answers that wait behind data cost up to a fifth.
SLOW_TOGETHER = 0.65
FAST_TOGETHER = 0.75
# A round trip is slow when it takes so many times as long as usual, and noticeably longer: a core
# that was elsewhere costs hundreds of microseconds.
SLOW_TRIP = 5.0
SLOW_TRIP_S = 1e-3

Numbers = Mapping[Pair, float]
Groups = tuple[tuple[int, ...], ...]


class SlowMember(Struct, frozen=True, kw_only=True):
    """A member of which all pairs are slow, in one direction or both."""

    member: int
    sends: bool
    receives: bool
    found: float  # its best rate
    usual: float


class SlowPair(Struct, frozen=True, kw_only=True):
    """A pair that is slow though both its members are not."""

    sender: int
    receiver: int
    both_ways: bool
    found: float
    usual: float


class Cut(Struct, frozen=True, kw_only=True):
    """Groups of members: everything between them is slow, and nothing inside them."""

    groups: Groups
    found: float
    usual: float


class Slowness(Struct, frozen=True, kw_only=True):
    members: tuple[SlowMember, ...] = ()
    pairs: tuple[SlowPair, ...] = ()
    cut: Cut | None = None


class Contention(Struct, frozen=True, kw_only=True):
    """What is slow only while everybody sends."""

    groups: Groups  # members that do not slow each other down
    alone: float  # between groups
    together: float


def doubtful_pairs(rates: Numbers) -> list[Pair]:
    """Return the pairs that are worth another look, the slowest first."""
    if not rates:
        return []
    usual = _usual(rates)
    doubtful = [pair for pair, rate in rates.items() if rate < DOUBTFUL * usual]
    return sorted(doubtful, key=lambda pair: (rates[pair], pair))


def is_doubtful_together(share: float) -> bool:
    """Return whether another look is worth it, at what is left of a rate when everybody sends."""
    return share < FAST_TOGETHER


def what_is_slow(rates: Numbers, *, most: float = inf) -> Slowness:
    """Return slow members, then cuts between groups, then single pairs that neither explains.

    Rates above ``most`` count as equal.
    """
    members = sorted({member for pair in rates for member in pair})
    if len(members) < 2:  # noqa: PLR2004
        return Slowness()
    if len(members) == 2:  # noqa: PLR2004
        return Slowness(pairs=_slower_direction(rates, most))
    slow = _slow_members(rates, members, most)
    known = {member.member for member in slow}
    rest = {pair: rate for pair, rate in rates.items() if not known & set(pair)}
    sent, received = _best(rest)
    expected = {(a, b): min(sent[a], received[b]) for a, b in rest}
    is_slow = {pair for pair, rate in rest.items() if rate < SLOW * min(expected[pair], most)}
    groups = _groups([one for one in members if one not in known], is_slow)
    if len(groups) > 1 and all(len(group) > 1 for group in groups):
        between = _between(groups, rest)
        return Slowness(
            members=slow,
            cut=Cut(
                groups=groups,
                found=median(rest[pair] for pair in between),
                usual=median(expected[pair] for pair in between),
            ),
        )
    return Slowness(
        members=slow,
        pairs=tuple(
            SlowPair(
                sender=a,
                receiver=b,
                both_ways=(b, a) in is_slow,
                found=rest[a, b],
                usual=expected[a, b],
            )
            for a, b in sorted(is_slow)
            if a < b or (b, a) not in is_slow
        ),
    )


def what_contends(alone: Numbers, together: Numbers) -> Contention | None:
    """Return groups between which rates fall when all send; None where no groups explain it."""
    shares = {pair: rate / alone[pair] for pair, rate in together.items() if pair in alone}
    members = sorted({member for pair in shares for member in pair})
    slowed = {pair for pair, share in shares.items() if share <= SLOW_TOGETHER}
    groups = _groups(members, slowed)
    if len(groups) < 2:  # noqa: PLR2004
        return None
    between = _between(groups, shares)
    if any(share < FAST_TOGETHER for pair, share in shares.items() if pair not in between):
        return None
    slowed_between = [pair for pair in between if pair in slowed]
    return Contention(
        groups=groups,
        alone=median(alone[pair] for pair in slowed_between),
        together=median(together[pair] for pair in slowed_between),
    )


def slow_round_trips(trips_s: Numbers) -> Slowness:
    """Return members and pairs whose messages take much longer than usual to be answered."""
    members = sorted({member for pair in trips_s for member in pair})
    if len(members) < 3:  # noqa: PLR2004 of two, nothing is usual
        return Slowness()
    least_s = {
        member: min(trip_s for pair, trip_s in trips_s.items() if member in pair)
        for member in members
    }
    usual_s = sorted(least_s.values())[(len(members) - 1) // 2]
    slow = tuple(
        SlowMember(member=member, sends=True, receives=True, found=found_s, usual=usual_s)
        for member, found_s in least_s.items()
        if _is_slow_trip(found_s, usual_s)
    )
    known = {member.member for member in slow}
    pairs = {
        (a, b): max(least_s[a], least_s[b])
        for (a, b), trip_s in trips_s.items()
        if not known & {a, b} and _is_slow_trip(trip_s, max(least_s[a], least_s[b]))
    }
    return Slowness(
        members=slow,
        pairs=tuple(
            SlowPair(sender=a, receiver=b, both_ways=True, found=trips_s[a, b], usual=expected_s)
            for (a, b), expected_s in sorted(pairs.items())
            if a < b and (b, a) in pairs
        ),
    )


def _is_slow_trip(found_s: float, usual_s: float) -> bool:
    return found_s > max(SLOW_TRIP * usual_s, usual_s + SLOW_TRIP_S)


def _slower_direction(rates: Numbers, most: float) -> tuple[SlowPair, ...]:
    """Return the slower direction of two members, which can only be compared with the other."""
    return tuple(
        SlowPair(sender=a, receiver=b, both_ways=False, found=rate, usual=rates[b, a])
        for (a, b), rate in rates.items()
        if rate < SLOW * min(rates.get((b, a), 0.0), most)
    )


def _slow_members(rates: Numbers, members: Sequence[int], most: float) -> tuple[SlowMember, ...]:
    sent, received = _best(rates)
    usual = _usual(rates)
    least = SLOW * min(usual, most)
    found = []
    for member in members:
        sends = sent.get(member, usual) < least
        receives = received.get(member, usual) < least
        if sends or receives:
            best = [sent[member]] * sends + [received[member]] * receives
            found.append(
                SlowMember(
                    member=member, sends=sends, receives=receives, found=max(best), usual=usual
                )
            )
    return tuple(found)


def _usual(rates: Numbers) -> float:
    """Return the rate that the better half of the members reaches at best, either way.

    It goes by each member's best, for one slow member spoils one pair of every other.
    """
    sent, received = _best(rates)
    best = sorted([*sent.values(), *received.values()])
    return best[len(best) // 2]


def _best(rates: Numbers) -> tuple[dict[int, float], dict[int, float]]:
    """Return what each member reaches at best when it sends, and when it receives."""
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for (sender, receiver), rate in rates.items():
        sent[sender] = max(rate, sent.get(sender, 0.0))
        received[receiver] = max(rate, received.get(receiver, 0.0))
    return sent, received


def _groups(members: Iterable[int], slow: set[Pair]) -> Groups:
    """Group the members that are connected by pairs which are slow in neither direction."""
    left = list(members)
    found = []
    while left:
        group = [left.pop(0)]
        for one in group:  # grows meanwhile
            near = [other for other in left if not {(one, other), (other, one)} & slow]
            group += near
            left = [other for other in left if other not in near]
        found.append(tuple(sorted(group)))
    return tuple(found)


def _between(groups: Groups, pairs: Iterable[Pair]) -> set[Pair]:
    group_of = {member: number for number, group in enumerate(groups) for member in group}
    return {(a, b) for a, b in pairs if group_of[a] != group_of[b]}

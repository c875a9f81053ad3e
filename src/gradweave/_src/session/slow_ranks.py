"""Who is slow: which rank lets all others wait, in which phase, and what a step would gain.

All ranks wait for the one that computes longest, and see that as time for the network. So ranks are
compared by what each computes itself; links, which let all ranks wait alike, by messages that are
sent to tell them apart (`link_times`).
"""

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from operator import methodcaller
from statistics import median, median_low
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.errors import GradweaveError
from gradweave._src.phases import PHASES, Phase, Phases
from gradweave._src.session.healing import Exposed, Sent, exposed_beside

LEAST_STEPS = 20
# Medians of so many parts of the steps tell what lasts from what a noisy machine does for a while.
PARTS = 4
# A rank that takes longer by less of a step is not spoken of, nor is a link that is slower by less,
# nor either of them where a step would gain less of itself.
LEAST_SHARE, LEAST_LINK, LEAST_GAIN = 0.015, 0.05, 0.0075
# How many times as large as the noise a difference has to be.
NOISES = 2.5
# A machine that is busy is so for a few steps in a row: so many of them tell as much as one.
STEPS_ALIKE = 4
# Standard deviations of a normal distribution in the median distance from its median, and in the
# error of a median of one.
DEVIATIONS, ERRORS = 1.4826, 1.2533
# To tell whose link is slow, each needs two others.
LEAST_LINKS = 3
# Messages that nothing hides are worth a word when they are longer than predicted by this share of
# a step, and by so many times.
MORE_EXPOSED, TIMES_EXPOSED = 0.10, 1.3

COMPUTED: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "network")


UNKNOWN = Phases(input_s=0.0, forward_s=0.0, backward_s=0.0, network_s=0.0)


class Typical(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a rank takes for its phases: medians over each part of its last steps.

    Noise is how much parts differ, and the error of a median by how much steps do. One part without
    errors says nothing of noise. All ranks must have equally many parts.
    """

    parts: tuple[Phases, ...]
    errors: Phases = UNKNOWN

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must not be empty")

    @property
    def phases(self) -> Phases:
        return _medians(self.parts)


def typical(steps: Sequence[Phases]) -> Typical | None:
    """Sum up a rank's last steps, given in their order; None where they are too few to tell."""
    if len(steps) < LEAST_STEPS:
        return None
    edges = [len(steps) * part // PARTS for part in range(PARTS + 1)]
    parts = [steps[edges[part] : edges[part + 1]] for part in range(PARTS)]
    medians = tuple(map(_medians, parts))
    off = [
        _distances(one, usual) for part, usual in zip(parts, medians, strict=True) for one in part
    ]
    share = DEVIATIONS * ERRORS * (STEPS_ALIKE / len(steps)) ** 0.5
    spread = _medians(off)
    return Typical(parts=medians, errors=_each(lambda phase: share * spread.seconds(phase)))


class SlowRank(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank that lets others wait; ``slow_ranks()`` of a wrapper returns them, the worst first.

    ``str()`` of it is a sentence that names the rank, its phase, and what a step would take
    without.

    Attributes:
        rank: the rank that is slow.
        host: the name of its host, where that is known.
        phase: what it is slow in: "input", "forward", "backward" or "network".
        times_as_long: how many times as long as the median rank it takes for that.
        step_s: seconds of a step now.
        step_without_s: seconds of a step if this rank, and those listed before it, were as fast as
            the median rank.
    """

    rank: int
    host: str | None
    phase: Phase
    times_as_long: float
    step_s: float
    step_without_s: float

    @property
    def gain_s(self) -> float:
        """How much shorter a step would be without it."""
        return self.step_s - self.step_without_s

    def __str__(self) -> str:
        return _said(self, "a step would take")


_DOES: dict[Phase, str] = {
    "input": "takes {times} as long as the median rank between two passes, for input and optimizer",
    "forward": "computes forward {times} as long as the median rank",
    "backward": "computes backward {times} as long as the median rank",
    "network": "has a link that takes {times} as long as the median one",
}


def sentences(found: Sequence[SlowRank]) -> list[str]:
    """Return a sentence for each; that for a rank after others tells what it gains beside those."""
    too = "without that, too, a step would take"
    return [str(one) if number == 0 else _said(one, too) for number, one in enumerate(found)]


def _said(one: SlowRank, would: str) -> str:
    where = "" if one.host is None else f" on {one.host}"
    does = _DOES[one.phase].format(times=f"{one.times_as_long:.2f}x")
    return (
        f"Rank {one.rank}{where} {does}: {would} {one.step_without_s * 1e3:.1f} instead of "
        f"{one.step_s * 1e3:.1f} ms."
    )


def slow_ranks(
    ranks: Sequence[Typical],
    *,
    hosts: Sequence[str] | None = None,
    links: Mapping[int, Sequence[float]] | None = None,
    sent: Sent | None = None,
) -> tuple[SlowRank, ...]:
    """Decide who clearly lets others wait, the worst first; nobody where that may be noise.

    ``links`` has, for one rank of each host, what a byte takes on its link, several times. With
    ``sent`` it is simulated what a step would take, otherwise that is the shortest it could be for
    computing, and for links the longest.
    """
    faults = [*_slow_computing(ranks), *_slow_links(links or {})]
    if len(ranks) == 1 or not faults:
        return ()
    healing = _Healing(ranks, faults, sent)
    healed: list[_Fault] = []
    found: list[SlowRank] = []
    without_s = [healing.step_s]
    while left := [fault for fault in faults if fault not in healed]:
        worst = min(left, key=lambda one: (healing.step_without_s([*healed, one]), -one.more_s))
        healed.append(worst)
        without_s.append(min(without_s[-1], healing.step_without_s(healed)))
        found.append(
            SlowRank(
                rank=worst.rank,
                host=None if hosts is None else hosts[worst.rank],
                phase=worst.phase,
                times_as_long=worst.times_as_long,
                step_s=healing.step_s,
                step_without_s=without_s[-1],
            )
        )
    # One of two that are alike gains nothing by itself, so what is left out are the last ones.
    least_s = LEAST_GAIN * healing.step_s
    enough = next(n for n, step_s in enumerate(without_s) if step_s - without_s[-1] < least_s)
    return tuple(found[:enough])


def slow_network(ranks: Sequence[Typical], sent: Sent) -> str | None:
    """Say that messages take longer than predicted, which no rank sees the reason of by itself."""
    step_s, slowest = _step_s(ranks), _slowest([one.phases for one in ranks])
    try:
        predicted_s = sent.exposed_s(slowest)
    except GradweaveError:  # a message without a price
        return None
    exposed_s = step_s - slowest.compute_s
    if exposed_s < max(predicted_s + MORE_EXPOSED * step_s, TIMES_EXPOSED * predicted_s):
        return None
    return (
        f"A step now waits {exposed_s * 1e3:.1f} ms for messages, and {predicted_s * 1e3:.1f} ms "
        "were predicted; slow_ranks(), called on every rank, tells whether one link is slow."
    )


class _Fault(NamedTuple):
    rank: int
    phase: Phase
    times_as_long: float
    more_s: float  # than the median rank; of a link, where nobody knows, 0


def _slow_computing(ranks: Sequence[Typical]) -> list[_Fault]:
    least_s = LEAST_SHARE * _step_s(ranks)
    more_s = {phase: _more(ranks, methodcaller("seconds", phase)) for phase in COMPUTED}
    in_all_s = _more(ranks, lambda one: one.compute_s)
    faults = []
    for rank, one in enumerate(ranks):
        errors_s = {phase: _error_s(ranks, rank, phase) for phase in COMPUTED}
        clear = [
            phase
            for phase in COMPUTED
            if _is_clear(more_s[phase], rank, least_s, error=errors_s[phase])
            # Otherwise other phases make up for it.
            and median(in_all_s[rank]) > median(more_s[phase][rank]) / 2
        ]
        if not clear and _is_clear(in_all_s, rank, least_s, error=hypot(*errors_s.values())):
            clear = [phase for phase in COMPUTED if median(more_s[phase][rank]) > 0]
        for phase in clear:
            own_s, median_s = one.phases.seconds(phase), _median_rank(ranks).seconds(phase)
            # A median rank may do nothing at all there; that is no number of times.
            times = own_s / (median_s or own_s)
            faults.append(_Fault(rank, phase, times, median(more_s[phase][rank])))
    return faults


def _slow_links(links: Mapping[int, Sequence[float]]) -> list[_Fault]:
    if len(links) < LEAST_LINKS:
        return []
    of_ranks = list(links)
    more = _over_median(list(zip(*links.values(), strict=True)), lambda own, usual: own / usual - 1)
    return [
        _Fault(rank, "network", 1 + median(more[place]), 0.0)
        for place, rank in enumerate(of_ranks)
        if _is_clear(more, place, LEAST_LINK)
    ]


class _Healing:
    """What a step would take without some of the faults."""

    def __init__(
        self, ranks: Sequence[Typical], faults: Sequence[_Fault], sent: Sent | None
    ) -> None:
        self.step_s = _step_s(ranks)
        self._phases = [one.phases for one in ranks]
        self._usual = _median_rank(ranks)
        self._links = [fault for fault in faults if fault.phase == "network"]
        slowest = _slowest(self._phases)
        exposed_s = max(0.0, self.step_s - slowest.compute_s)
        self._exposed: Exposed = exposed_beside(replace(slowest, network_s=exposed_s), sent)

    def step_without_s(self, healed: Sequence[_Fault]) -> float:
        phases = list(self._phases)
        for fault in healed:
            if fault.phase != "network":
                field = f"{fault.phase}_s"
                usual_s = self._usual.seconds(fault.phase)
                phases[fault.rank] = replace(phases[fault.rank], **{field: usual_s})
        slowest = _slowest(phases)
        return slowest.compute_s + self._exposed(slowest, self._links_without(healed))

    def _links_without(self, healed: Sequence[_Fault]) -> float:
        """Return how many times as long as now messages take, by the slowest link that is left."""
        before = max((fault.times_as_long for fault in self._links), default=1.0)
        left = [fault.times_as_long for fault in self._links if fault not in healed]
        return max(left, default=1.0) / before


def _more(ranks: Sequence[Typical], length: Callable[[Phases], float]) -> list[list[float]]:
    """Return by how much each rank takes longer than the median rank, part by part of the steps.

    Parts are compared each by itself, so that what all ranks do at once, such as warming up, is no
    difference.
    """
    parts = list(zip(*([length(part) for part in one.parts] for one in ranks), strict=True))
    return _over_median(parts, lambda own_s, usual_s: own_s - usual_s)


def _over_median(
    parts: Sequence[Sequence[float]], difference: Callable[[float, float], float]
) -> list[list[float]]:
    """Return each rank's differences from the median rank, which is the lower one of two."""
    compared = [[difference(own, median_low(part)) for own in part] for part in parts]
    return [list(of_rank) for of_rank in zip(*compared, strict=True)]


def _is_clear(
    more: Sequence[Sequence[float]], rank: int, least: float, *, error: float = 0.0
) -> bool:
    """Return whether a rank takes longer in every part, and by more than noise would make it."""
    own = more[rank]
    noise = max(_noise(own), median(map(_noise, more)), error)
    return min(own) > 0 and median(own) >= max(least, NOISES * noise)


def _noise(parts: Sequence[float]) -> float:
    return (max(parts) - min(parts)) / 2


def _error_s(ranks: Sequence[Typical], rank: int, phase: Phase) -> float:
    """Return the error of the difference between a rank and the median rank."""
    errors_s = [one.errors.seconds(phase) for one in ranks]
    return hypot(errors_s[rank], median(errors_s))


def _each(seconds: Callable[[Phase], float]) -> Phases:
    return Phases(**{f"{phase}_s": seconds(phase) for phase in PHASES})


def _distances(one: Phases, other: Phases) -> Phases:
    return _each(lambda phase: abs(one.seconds(phase) - other.seconds(phase)))


def _medians(several: Sequence[Phases]) -> Phases:
    return _each(lambda phase: median(one.seconds(phase) for one in several))


def _median_rank(ranks: Sequence[Typical]) -> Phases:
    """Return the median rank's phases; of two ranks the lower one, so that it is the other."""
    phases = [one.phases for one in ranks]
    return _each(lambda phase: median_low(one.seconds(phase) for one in phases))


def _slowest(phases: Sequence[Phases]) -> Phases:
    return max(phases, key=lambda one: one.compute_s)


def _step_s(ranks: Sequence[Typical]) -> float:
    """Return a step as all ranks see it, for it ends on all of them together."""
    return median(median(part.step_s for part in one.parts) for one in ranks)

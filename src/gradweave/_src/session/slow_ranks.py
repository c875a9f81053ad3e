"""Who is slow: which rank lets all others wait, in which phase, and what a step would gain.

All ranks wait for the one that computes longest, and see that as time for the network. So ranks are
compared by how long each computes itself. A slow link lets all ranks wait alike, so links are
compared by messages that are sent to tell them apart (`link_times`).
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
from gradweave._src.session.without_slowness import Exposed, SentPerStep, exposed_beside

LEAST_TIMED_STEPS = 20
# Medians of so many parts of the steps tell what lasts from what a noisy machine does for a while.
PARTS = 4
# Not reported are a rank that takes longer by less than LEAST_SHARE of a step, a link that is
# slower by less than LEAST_LINK, and either of them if a step would gain less than LEAST_GAIN of
# itself.
LEAST_SHARE, LEAST_LINK, LEAST_GAIN = 0.015, 0.05, 0.0075
# A difference has to be so many times as large as the noise.
NOISES = 2.5
# A machine is busy for a few steps in a row, so this many neighbouring steps tell as much as one.
STEPS_ALIKE = 4
# Of a normal distribution: the standard deviation in units of the median distance from the median,
# and the error of a median in units of the error of a mean.
DEVIATIONS, ERRORS = 1.4826, 1.2533
# It takes three links to tell which of them is the slow one.
LEAST_LINKS = 3
# That a step waits for messages is worth a word when it waits longer than predicted by this share
# of a step, and so many times as long.
MORE_EXPOSED, TIMES_EXPOSED = 0.10, 1.3

COMPUTED_PHASES: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "network")
NO_ERRORS = Phases(input_s=0.0, forward_s=0.0, backward_s=0.0, network_s=0.0)


class Typical(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a rank takes for its phases: medians over each part of its last steps.

    Noise is how much parts differ; ``errors`` are those of a median, by how much steps differ. One
    part without errors says nothing of noise. All ranks must have equally many parts.
    """

    parts: tuple[Phases, ...]
    errors: Phases = NO_ERRORS

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must not be empty")

    @property
    def phases(self) -> Phases:
        return _medians(self.parts)


def typical(steps: Sequence[Phases]) -> Typical | None:
    """Sum up a rank's last steps, in their order; return None where they are too few to tell."""
    if len(steps) < LEAST_TIMED_STEPS:
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
    """Return a sentence for each; from the second on they tell what is gained beside the others."""
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
    sent: SentPerStep | None = None,
) -> tuple[SlowRank, ...]:
    """Decide who clearly lets others wait, the worst first; nobody where that may be noise.

    ``links`` has several measurements of what a byte takes on the link of one rank of each host.
    With ``sent`` it is simulated what a step would take. Without, it is the least that it could
    take where computing is slow, and the most where a link is slow.
    """
    faults = [*_slow_computing(ranks), *_slow_links(links or {})]
    if len(ranks) == 1 or not faults:
        return ()
    step = _StepWithoutFaults(ranks, faults, sent)
    removed: list[_Fault] = []
    found: list[SlowRank] = []
    without_s = [step.now_s]
    while left := [fault for fault in faults if fault not in removed]:
        worst = min(left, key=lambda one: (step.without_s([*removed, one]), -one.more_s))
        removed.append(worst)
        without_s.append(min(without_s[-1], step.without_s(removed)))
        found.append(
            SlowRank(
                rank=worst.rank,
                host=None if hosts is None else hosts[worst.rank],
                phase=worst.phase,
                times_as_long=worst.times_as_long,
                step_s=step.now_s,
                step_without_s=without_s[-1],
            )
        )
    # The first of two equally slow ranks gains nothing by itself, so only the last ones are left
    # out.
    least_s = LEAST_GAIN * step.now_s
    enough = next(n for n, step_s in enumerate(without_s) if step_s - without_s[-1] < least_s)
    return tuple(found[:enough])


def slow_network(ranks: Sequence[Typical], sent: SentPerStep) -> str | None:
    """Say that messages take longer than predicted; no rank can tell the reason by itself."""
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
    more_s: float  # than the median rank; 0 for a link, where it is unknown


def _slow_computing(ranks: Sequence[Typical]) -> list[_Fault]:
    least_s = LEAST_SHARE * _step_s(ranks)
    more_s = {phase: _more(ranks, methodcaller("seconds", phase)) for phase in COMPUTED_PHASES}
    in_all_s = _more(ranks, lambda one: one.compute_s)
    faults = []
    for rank, one in enumerate(ranks):
        errors_s = {phase: _error_s(ranks, rank, phase) for phase in COMPUTED_PHASES}
        clear = [
            phase
            for phase in COMPUTED_PHASES
            if _is_clear(more_s[phase], rank, least_s, error=errors_s[phase])
            # It also takes longer in all; otherwise other phases make up for this one.
            and median(in_all_s[rank]) > median(more_s[phase][rank]) / 2
        ]
        if not clear and _is_clear(in_all_s, rank, least_s, error=hypot(*errors_s.values())):
            clear = [phase for phase in COMPUTED_PHASES if median(more_s[phase][rank]) > 0]
        for phase in clear:
            own_s, median_s = one.phases.seconds(phase), _median_rank(ranks).seconds(phase)
            # Where the median rank takes no time for it there is no ratio, and it is taken to be 1.
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


class _StepWithoutFaults:
    """What a step would take if some slow ranks and links were as fast as the median ones."""

    def __init__(
        self, ranks: Sequence[Typical], faults: Sequence[_Fault], sent: SentPerStep | None
    ) -> None:
        self.now_s = _step_s(ranks)
        self._phases = [one.phases for one in ranks]
        self._usual = _median_rank(ranks)
        self._links = [fault for fault in faults if fault.phase == "network"]
        slowest = _slowest(self._phases)
        exposed_s = max(0.0, self.now_s - slowest.compute_s)
        self._exposed: Exposed = exposed_beside(replace(slowest, network_s=exposed_s), sent)

    def without_s(self, removed: Sequence[_Fault]) -> float:
        phases = list(self._phases)
        for fault in removed:
            if fault.phase != "network":
                field = f"{fault.phase}_s"
                usual_s = self._usual.seconds(fault.phase)
                phases[fault.rank] = replace(phases[fault.rank], **{field: usual_s})
        slowest = _slowest(phases)
        return slowest.compute_s + self._exposed(slowest, self._links_without(removed))

    def _links_without(self, removed: Sequence[_Fault]) -> float:
        """Return what messages take by the slowest link that is left, as a multiple of now."""
        before = max((fault.times_as_long for fault in self._links), default=1.0)
        left = [fault.times_as_long for fault in self._links if fault not in removed]
        return max(left, default=1.0) / before


def _more(ranks: Sequence[Typical], length: Callable[[Phases], float]) -> list[list[float]]:
    """Return by how much each rank takes longer than the median rank, for each part of the steps.

    Each part is compared by itself, so that what all ranks do at once, such as warming up, makes no
    difference.
    """
    parts = list(zip(*([length(part) for part in one.parts] for one in ranks), strict=True))
    return _over_median(parts, lambda own_s, usual_s: own_s - usual_s)


def _over_median(
    parts: Sequence[Sequence[float]], difference: Callable[[float, float], float]
) -> list[list[float]]:
    """Return each rank's differences from the median rank; of two ranks the lower is the median."""
    compared = [[difference(own, median_low(part)) for own in part] for part in parts]
    return [list(of_rank) for of_rank in zip(*compared, strict=True)]


def _is_clear(
    more: Sequence[Sequence[float]], rank: int, least: float, *, error: float = 0.0
) -> bool:
    """Return whether a rank takes longer in every part, and by more than noise explains."""
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
    """Return the phases of a median rank; of two ranks each phase is the faster one's."""
    phases = [one.phases for one in ranks]
    return _each(lambda phase: median_low(one.seconds(phase) for one in phases))


def _slowest(phases: Sequence[Phases]) -> Phases:
    return max(phases, key=lambda one: one.compute_s)


def _step_s(ranks: Sequence[Typical]) -> float:
    """Return what a step takes; all ranks see the same, for it ends on all of them together."""
    return median(median(part.step_s for part in one.parts) for one in ranks)

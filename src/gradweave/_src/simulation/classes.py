"""What a schedule costs on given links, with clocks for classes of ranks instead of every rank.

Where all ranks do the same and the network looks the same from several of them, these have the same
clocks all the time: shifting all ranks along an axis of the schedule by whole groups of the network
changes nothing. One rank of each such class is simulated. Parts of a message are called by their
distance from a rank's own, which is the same for all of a class, and are forgotten once they have
been sent for the last time. So a ring of 100,000 ranks on hosts of four has four classes and four
clocks for the one part that each has just received.

The result is that of ``simulate_schedule`` for messages that all ranks divide evenly; of others,
this takes every part to be equally long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gradweave._src.collectives.alike import Alike, Axis, Stage
from gradweave._src.collectives.schedule import IntArray
from gradweave._src.costs import Links
from gradweave._src.costs.cost import FloatArray
from gradweave._src.errors import RequestError


def simulate_classes(stages: Sequence[Stage], links: Links, *, ranks: int, nbytes: float) -> float:
    """Return the seconds until the last rank is done.

    Ranks are numbered with the innermost tier fastest.
    """
    factors = links.factors(ranks)
    if factors is None:
        raise RequestError(f"{ranks} ranks do not fill the tiers of these links evenly")
    classes = _Classes(links, factors, list(dict.fromkeys(stage.axis for stage in stages)))
    held_bytes = nbytes if not stages or stages[0].alike.add else nbytes / ranks
    for stage in stages:
        part_bytes = held_bytes / stage.axis.size if stage.alike.add else held_bytes
        classes.run(stage, part_bytes)
        held_bytes = part_bytes if stage.alike.add else part_bytes * stage.axis.size
    return classes.end_s


def classes_of(links: Links, factors: Sequence[int], axes: Sequence[Axis]) -> list[int]:
    """Return how many places along each axis differ; those behind them are like the first ones.

    The network has boundaries between groups of so many neighbouring ranks. Those that lie within
    an axis make its places differ up to the outermost of them.
    """
    boundaries = [prod(factors[:tier]) for tier in range(1, len(links.levels))]
    different = []
    for stride, size in axes:
        within = [group for group in boundaries if stride < group < stride * size]
        if any(group % stride or stride * size % group for group in within):
            raise RequestError(
                f"groups of {within} ranks do not divide those of the schedule, {stride * size} "
                f"ranks of which every {stride}th takes part; take factors of the same tiers"
            )
        different.append(max(within, default=stride) // stride)
    return different


@dataclass(slots=True)
class _Classes:
    """The clocks of one rank of each class, all classes in one row."""

    links: Links
    factors: tuple[int, ...]
    axes: list[Axis]
    end_s: float = 0.0
    shape: list[int] = field(init=False)
    has_s: FloatArray = field(init=False)  # when a rank had what its next stage begins with
    sending_s: FloatArray = field(init=False)
    receiving_s: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.shape = classes_of(self.links, self.factors, self.axes)
        self.has_s, self.sending_s, self.receiving_s = np.zeros((3, prod(self.shape)))

    def run(self, stage: Stage, part_bytes: float) -> None:
        """Simulate a stage in all groups of its axis, round by round."""
        alike, size = stage.alike, stage.axis.size
        slowest_sum = max(level.link.sum_s_per_byte for level in self.links.levels)
        adding_s_per_byte = slowest_sum if alike.add else 0.0
        parts_s = _Parts(alike, self.has_s)
        places = _Places(self.links, self.factors, stage.axis)
        arrows: dict[int, tuple[IntArray, IntArray]] = {}
        durations: dict[tuple[int, int], FloatArray] = {}
        everything_s = self.has_s
        for number in range(alike.rounds):
            ahead, parts = alike.hop(number)
            if ahead not in arrows:
                arrows[ahead] = self._along(stage.axis, ahead), self._along(stage.axis, -ahead)
            target, source = arrows[ahead]
            kind = ahead, len(parts)
            if kind not in durations:
                taken_s = places.taken_s(ahead, len(parts) * part_bytes)
                durations[kind] = self._of_classes(stage.axis, taken_s)
            begin_s = np.maximum(self.sending_s, self.receiving_s[target])
            sent_s = np.maximum(begin_s, parts_s.ready(parts % size)) + durations[kind]
            self.sending_s = np.maximum(self.sending_s, sent_s)
            received_s = sent_s[source] + len(parts) * part_bytes * adding_s_per_byte
            self.receiving_s = np.maximum(self.receiving_s, received_s)
            parts_s.receive((parts - ahead) % size, received_s)
            everything_s = np.maximum(everything_s, received_s)
        if alike.rounds:
            self.end_s = max(self.end_s, float(everything_s.max()))
        self.has_s = parts_s.ready(np.array([0])) if alike.add else everything_s

    def _along(self, axis: Axis, ahead: int) -> IntArray:
        """Return for each class the class of the rank so many places ahead."""
        number = np.arange(prod(self.shape)).reshape(self.shape)
        return np.roll(number, -ahead, axis=self.axes.index(axis)).ravel()

    def _of_classes(self, axis: Axis, by_place: FloatArray) -> FloatArray:
        """Return for each class what is given for each place along an axis."""
        along = self.axes.index(axis)
        shape = [1] * len(self.shape)
        shape[along] = self.shape[along]
        return np.broadcast_to(by_place[: shape[along]].reshape(shape), self.shape).ravel()


class _Parts:
    """When each part of a stage was there, one row of classes for each part.

    Parts that came together share their row.
    """

    def __init__(self, alike: Alike, has_s: FloatArray) -> None:
        self._alike = alike
        # A rank that is to add begins with all parts, one that is to gather with its own.
        self._at_first_s = has_s
        self._s: dict[int, FloatArray] = {} if alike.add else {0: has_s}

    def ready(self, parts: IntArray) -> FloatArray:
        """Return when a rank has all of these parts, which it is about to send."""
        take = self._s.pop if self._alike.sends_once else self._s.get
        rows = [take(part, self._at_first_s) for part in parts.tolist()]
        different = {id(row): row for row in rows}.values()
        return np.asarray(np.maximum.reduce(list(different)))

    def receive(self, parts: IntArray, at_s: FloatArray) -> None:
        """Note when parts came; a rank that adds has a sum when its own part is there, too."""
        added: dict[int, FloatArray] = {}
        for part in parts.tolist():
            if not self._alike.add:
                self._s[part] = at_s
                continue
            own_s = self._s.get(part, self._at_first_s)
            if id(own_s) not in added:
                added[id(own_s)] = np.maximum(own_s, at_s)
            self._s[part] = added[id(own_s)]


class _Places:
    """How long a hop takes from each place along an axis, with all others on their way too.

    The same as in simulation/schedule.py, for one group of the axis: where a group of the network
    lies within one place, all its ranks are at that place and do the same; where it holds several
    places, each of these stands for as many ranks as are between two of them.
    """

    def __init__(self, links: Links, factors: tuple[int, ...], axis: Axis) -> None:
        self._links, self._factors, self._axis = links, factors, axis

    def taken_s(self, ahead: int, nbytes: float) -> FloatArray:
        place = np.arange(self._axis.size)
        target = (place + ahead) % self._axis.size
        latency_s = np.full(len(place), self._links.levels[0].link.latency_s)
        slowest_s = np.zeros(len(place))
        for tier, level in enumerate(self._links.levels):
            below = prod(self._factors[:tier])
            crosses = self._differ(place, target, below)
            if tier > 0:
                latency_s[crosses] = level.link.latency_s
            if self._links.topology == "torus" and tier > 0:
                crosses &= ~self._differ(place, target, below * self._factors[tier])
                below = self._factors[0]
            together = min(below, self._axis.stride)
            for end in (place, target):
                group = end // self._places_in(below)
                ranks = np.bincount(group[crosses], minlength=len(place)) * together
                busy_s = ranks[group] * nbytes * level.link.s_per_byte
                slowest_s = np.where(crosses, np.maximum(slowest_s, busy_s), slowest_s)
        return latency_s + slowest_s

    def _differ(self, place: IntArray, target: IntArray, ranks: int) -> np.ndarray:
        """Return whether two places are in different groups of so many neighbouring ranks."""
        if ranks >= self._axis.stride * self._axis.size:
            return np.zeros(len(place), dtype=bool)
        inside = self._places_in(ranks)
        return np.asarray(place // inside != target // inside)

    def _places_in(self, ranks: int) -> int:
        return min(self._axis.size, max(1, ranks // self._axis.stride))

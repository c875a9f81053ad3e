"""Collectives in which every rank does the same, seen from where it stands.

Such a collective is written down once for all ranks, not once for each: in a round, every member of
a group sends the same parts, counted from its own, the same number of places ahead. A ring of
100,000 ranks is one hop a round. ``spread`` makes the schedule of all ranks of it, which is
verified and run; ``Stage`` places it in a larger world, whose classes of ranks are simulated
without any list of ranks (simulation/classes.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradweave._src.collectives.schedule import IntArray, Round, Schedule, transfers


class Hop(NamedTuple):
    """What every member does in a round: send these parts to the member so many places ahead."""

    ahead: int
    parts: IntArray  # counted from the member's own part, modulo the members


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """A reduce-scatter (``add``) or an all-gather among members that are all alike."""

    members: int
    rounds: int
    hop: Callable[[int], Hop]
    add: bool
    sends_once: bool  # no member sends a part twice: what it has sent may be forgotten

    def backwards(self) -> "Alike":
        """Return the other half of an all-reduce: each hop the other way, the last round first."""

        def hop(number: int) -> Hop:
            ahead, parts = self.hop(self.rounds - 1 - number)
            return Hop(-ahead, parts - ahead)

        # Sums are sent once each, whatever is done with them later.
        return Alike(
            members=self.members,
            rounds=self.rounds,
            hop=hop,
            add=not self.add,
            sends_once=not self.add,
        )


def spread(alike: Alike) -> Schedule:
    """Return the schedule for all members.

    Block b belongs to member b, and every part is one transfer.
    """

    def round_(number: int) -> Round:
        ahead, parts = alike.hop(number)
        source = np.arange(alike.members)[:, None]
        block = (source + parts[None, :]) % alike.members
        target = (source + ahead) % alike.members
        begin, many = block.ravel(), len(parts)
        return transfers(
            np.repeat(source, many), np.repeat(target, many), begin, begin + 1, add=alike.add
        )

    return Schedule(alike.members, alike.members, alike.rounds, round_)


class Axis(NamedTuple):
    """Ranks r, r + stride, r + 2 stride, … form the groups of a stage, ``size`` ranks each."""

    stride: int
    size: int


class Stage(NamedTuple):
    """What all groups of an axis do at once, on the part of the message that its ranks hold."""

    axis: Axis
    alike: Alike


class Halves(NamedTuple):
    """A reduce-scatter among the groups of an axis, and the all-gather that undoes it."""

    axis: Axis
    scattering: Alike
    gathering: Alike


def placed(halves: list[Halves], stride: int) -> list[Halves]:
    """Return the same halves among ranks that are ``stride`` apart."""
    return [half._replace(axis=Axis(half.axis.stride * stride, half.axis.size)) for half in halves]

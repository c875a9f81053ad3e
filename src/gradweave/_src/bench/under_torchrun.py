"""Experiments in the group that torchrun started: rank 0 asks, and all ranks answer.

Everything happens in one default group: a second one would fail, for the store keeps the addresses
of the first.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch.distributed as dist
from msgspec import Struct

from gradweave._src.bench.calibration import CalibrationQuestion
from gradweave._src.bench.calibration_job import calibrated
from gradweave._src.bench.ranks import default_group, node_numbers
from gradweave._src.bench.training import Place, TrainingAnswer, TrainingQuestion
from gradweave._src.bench.training_job import answers
from gradweave._src.comm.small_messages import broadcast_text
from gradweave._src.network import Network

Found = TypeVar("Found")


class Asked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all ranks are to do next; nothing if it is over."""

    calibrate: CalibrationQuestion | None = None
    train: TrainingQuestion | None = None


class Ranks:
    """All ranks, as rank 0 sees them."""

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        self._group, self.place = group, place
        self._listening = True

    def calibrate(self, question: CalibrationQuestion, *, advance: Callable[[], None]) -> Network:
        self._say(Asked(calibrate=question))
        network = calibrated(question, self._group, advance=advance)
        assert network is not None, "rank 0 has the answer"
        self._listening = True
        return network

    def train(self, question: TrainingQuestion, take: Callable[[TrainingAnswer], None]) -> None:
        self._say(Asked(train=question))
        for one in answers(question, self._group):
            take(one)
        self._listening = True

    def dismiss(self) -> None:
        """Tell them that it is over, unless one has failed on the way: that ends all of them."""
        if self._listening:
            self._say(Asked())

    def _say(self, asked: Asked) -> None:
        self._listening = False
        _hear(self._group, asked)


def in_default_group(lead: Callable[[Ranks], Found]) -> Found | None:
    """Return on rank 0 what ``lead`` returns; the other ranks do what it asks of them."""
    with default_group() as group:
        return led(group, lead)


def led(group: dist.ProcessGroup, lead: Callable[[Ranks], Found]) -> Found | None:
    """Do the same as ``in_default_group`` in a given group, which nothing else uses meanwhile."""
    place = _place(group)
    if group.rank() != 0:
        _follow(group)
        return None
    ranks = Ranks(group, place)
    try:
        return lead(ranks)
    finally:
        ranks.dismiss()


def _follow(group: dist.ProcessGroup) -> None:
    while (asked := _hear(group)) != Asked():
        if asked.calibrate is not None:
            calibrated(asked.calibrate, group, advance=lambda: None)
        if asked.train is not None:
            for _ in answers(asked.train, group):
                pass


def _hear(group: dist.ProcessGroup, asked: Asked | None = None) -> Asked:
    """Return what rank 0 asks; other ranks pass None as ``asked``."""
    text = "" if asked is None else msgspec.json.encode(asked).decode()
    heard = broadcast_text(group, text)
    return msgspec.json.decode(heard, type=Asked)


def _place(group: dist.ProcessGroup) -> Place:
    """Describe the nodes as the launcher numbers them, each taken to be as full as the fullest."""
    ranks_of = Counter(node_numbers(group))
    return Place(
        nodes=len(ranks_of),
        ranks_per_node=max(ranks_of.values()),
        rate=None,
        workers=group.size(),
    )

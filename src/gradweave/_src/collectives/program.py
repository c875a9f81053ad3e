"""One rank's share of a schedule: what it sends and receives, and what each step must wait for.

Rounds are a way to write an algorithm down; a network has no rounds. A program keeps only what the
algorithm needs: a block is sent after it has its content, and overwritten after it has been sent.
Any order of steps that respects ``needs`` gives the same result.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule


class Kind(Enum):
    SEND = "send"
    ADD = "add"
    REPLACE = "replace"


class Step(NamedTuple):
    """Send blocks ``first`` to ``last``, or receive them and add them or put them in place."""

    kind: Kind
    peer: int
    first: int
    last: int
    round: int  # for error messages, and for backends that need rounds after all
    ordinal: int  # of the messages between these two ranks in this direction
    needs: tuple[int, ...]  # steps of this program that must be over
    sent_too: bool  # received in the round in which this rank sends what the blocks held before

    @property
    def beside(self) -> bool:
        """Whether the message needs a buffer of its own.

        It does when it is added, or when the old content is still being sent.
        """
        return self.kind is Kind.ADD or self.sent_too


@dataclass(frozen=True, slots=True)
class Program:
    """The steps in the order of their rounds, and what an executor asks of them again and again."""

    blocks: int
    steps: tuple[Step, ...]
    receives: tuple[int, ...]  # which of the steps receive
    waiting_for: tuple[tuple[int, ...], ...]  # per step, the sends that need it
    block_by_block: bool  # no step of any rank takes several blocks
    most_steps: int  # of any rank
    sums_copies: bool  # some sums are made on several ranks at once, from the same parts


def program(schedule: Schedule, rank: int) -> Program:
    writing = _Writing(schedule.blocks)
    block_by_block, sums_copies = True, False
    steps_of = np.zeros(schedule.ranks, dtype=np.int64)
    for number in range(schedule.rounds):
        one = schedule.round(number)
        # Of all ranks, because all must cut the message alike.
        block_by_block &= bool((one.last - one.first == 1).all())
        sums_copies |= _swaps(one)
        for ends in (one.source, one.target):
            steps_of += np.bincount(ends, minlength=schedule.ranks)
        # What is sent was there before the round, so sends come first.
        for place in np.flatnonzero(one.source == rank):
            writing.send(number, one, place)
        for place in np.flatnonzero(one.target == rank):
            writing.receive(number, one, place)
    steps = tuple(writing.steps)
    waiting: list[list[int]] = [[] for _ in steps]
    for index, step in enumerate(steps):
        if step.kind is Kind.SEND:
            for need in step.needs:
                waiting[need].append(index)
    return Program(
        blocks=schedule.blocks,
        steps=steps,
        receives=tuple(i for i, step in enumerate(steps) if step.kind is not Kind.SEND),
        waiting_for=tuple(tuple(sends) for sends in waiting),
        block_by_block=block_by_block,
        most_steps=int(steps_of.max()),
        sums_copies=sums_copies,
    )


def _swaps(one: Round) -> bool:
    """Return whether two ranks add each other's version of a block."""
    there = {
        (source, target): range(first, last)
        for source, target, first, last, add in zip(*(x.tolist() for x in one), strict=True)
        if add
    }
    return any(
        (back := there.get((target, source))) is not None
        and max(blocks.start, back.start) < min(blocks.stop, back.stop)
        for (source, target), blocks in there.items()
    )


class _Writing:
    """The program so far, and per block who wrote it last and who has read it since."""

    def __init__(self, blocks: int) -> None:
        self.steps: list[Step] = []
        self.last_write: list[int | None] = [None] * blocks
        self.reads: list[list[int]] = [[] for _ in range(blocks)]
        self.messages: dict[tuple[bool, int], int] = {}

    def send(self, number: int, one: Round, place: np.intp) -> None:
        blocks = range(one.first[place], one.last[place])
        needs = {self.last_write[block] for block in blocks}
        step = self._append(Kind.SEND, int(one.target[place]), blocks, number, needs=needs)
        for block in blocks:
            self.reads[block].append(step)

    def receive(self, number: int, one: Round, place: np.intp) -> None:
        blocks = range(one.first[place], one.last[place])
        needs = {self.last_write[block] for block in blocks}
        reads = {read for block in blocks for read in self.reads[block]}
        sent_too = any(self.steps[read].round == number for read in reads)
        kind, peer = Kind.ADD if one.add[place] else Kind.REPLACE, int(one.source[place])
        step = self._append(kind, peer, blocks, number, needs=needs | reads, sent_too=sent_too)
        for block in blocks:
            self.last_write[block] = step
            self.reads[block] = []

    def _append(
        self,
        kind: Kind,
        peer: int,
        blocks: range,
        number: int,
        *,
        needs: set[int | None],
        sent_too: bool = False,
    ) -> int:
        pair = (kind is Kind.SEND, peer)
        ordinal = self.messages.get(pair, 0)
        self.messages[pair] = ordinal + 1
        known = tuple(sorted(step for step in needs if step is not None))
        self.steps.append(
            Step(kind, peer, blocks.start, blocks.stop, number, ordinal, known, sent_too)
        )
        return len(self.steps) - 1

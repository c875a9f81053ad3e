"""A few messages beside the training, queued on an accelerator.

Backends of accelerators want messages of all groups launched in an order that all ranks share: two
ranks that begin two of them the other way round may wait for each other for ever. So nothing is
launched from a thread of its own here. All ranks queue the same messages after the same pass, on
the thread that trains, and look at what they took when it is over: no host waits, and no stream of
the training does.
"""

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from itertools import product

import msgspec
import torch
from msgspec import Struct

from gradweave._src.clocks import Clock, have_passed
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.lanes import Lanes
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.device_order import Order, wait_for_current
from gradweave._src.measure.network import send_in_turn
from gradweave._src.planning import OPERATIONS
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.runtime.driving.announcements import Announcements
from gradweave._src.runtime.driving.probing import MOST_REPEATS, Budget, RankProbe
from gradweave._src.session.commands import Probe, Probed
from gradweave._src.session.learning import STREAMED, MessageSample
from gradweave._src.torch_internals import named_range

CLOSED_WITHIN_S = 5.0
REFUSED = "refused"


class Stage(Enum):
    """How far a round is, on one rank."""

    SENT = "messages are on their way, or there are none yet"
    SAID = "others may know what they took"
    ANNOUNCED = "rank 0 has announced the next round, and waits for it as all others do"
    OVER = "nothing is sent any more"


class Round(Struct, frozen=True, tag=True):
    """The sizes that all ranks send after a pass; without any, probing is over."""

    sizes_bytes: tuple[int, ...] = ()


class QueuedProbing(Activity):
    """Probes in rounds: ranks say what the last one took, and rank 0 announces the next."""

    def __init__(
        self,
        command: Probe,
        own_group: OwnGroup,
        announcements: Announcements,
        *,
        clock: Clock,
        device: torch.device,
        name: str,
    ) -> None:
        self._command, self._announcements, self._clock = command, announcements, clock
        self._device, self._name = device, name
        self._communicator = Communicator(own_group.group, topology=own_group.topology)
        is_sharded = any(way.operation in OPERATIONS["both"] for way in command.ways)
        self._lanes = Lanes([self._communicator] if is_sharded else ())
        self._stream = torch.Stream(device=device)
        self._budget = Budget(command)
        self._samples: list[MessageSample] = []
        self._rounds = 0
        self._sizes: tuple[int, ...] = ()  # of the round under way
        self._marks: list[object] = []  # of the round under way
        self._stage = Stage.SENT
        self._say("")

    def pass_over(self) -> None:
        """Begin the round that was announced for this pass, as all ranks do."""
        if self._stage in {Stage.SAID, Stage.ANNOUNCED}:
            text = self._announcements.heard()
            if text is not None:
                with suppress(RuntimeError, OSError):  # of the store: all begin this round
                    self._announcements.board.forget(self._topic)
                self._begin(msgspec.json.decode(text, type=Round))

    def step_over(self) -> None:
        """Say what the last round took; on rank 0, announce the next when all have."""
        if self._stage is Stage.SENT and have_passed(self._clock, self._marks):
            self._say(msgspec.json.encode(self._taken_s()).decode())
        board = self._announcements.board
        if self._stage is Stage.SAID and board.rank == 0:
            said = board.reports(self._topic)
            if said is not None:
                self._announce(list(said.values()))

    def part(self) -> RankProbe | None:
        if self._stage is not Stage.OVER:
            return None
        return RankProbe(
            samples=tuple(self._samples),
            taken_s=self._budget.spent_s,
            sent_bytes=self._budget.sent_bytes,
        )

    def agreed(self, parts: Sequence[RankProbe]) -> Probed:
        return Probed(parts[0].samples, parts[0].taken_s, parts[0].sent_bytes)

    def close(self) -> None:
        """Close it, done or not; a rank that is not done says so, and nobody sends any more."""
        if self._stage is not Stage.OVER:
            self._stage = Stage.OVER
            with suppress(RuntimeError, OSError):  # of the store, which others have lost as well
                _refuse(self._announcements, self._topic)
        self._lanes.close(CLOSED_WITHIN_S)

    @property
    def _topic(self) -> str:
        return _topic(self._name, self._rounds)

    def _say(self, text: str) -> None:
        self._announcements.report(self._topic, text, must_be_heard=False)
        self._stage = Stage.SAID

    def _begin(self, announced: Round) -> None:
        self._rounds += 1
        self._sizes = announced.sizes_bytes
        self._stage = Stage.SENT if self._sizes else Stage.OVER
        wait_for_current(self._stream, Order.PROBES_AFTER_STEP)
        with self._stream:
            self._marks = [mark for size in self._sizes for mark in self._sent(size)]

    def _sent(self, nbytes: int) -> list[object]:
        """Queue messages; return three marks for each way, around one alone and behind a stream."""
        messages = torch.zeros(STREAMED, max(1, nbytes // 4), device=self._device)
        marks: list[object] = []
        for way in self._command.ways:
            with named_range("gradweave: probing %d bytes", nbytes):
                for sent in (1, 1, STREAMED):  # the first brings ranks together
                    send_in_turn(self._communicator, self._lanes, way, list(messages[:sent]))
                    marks.append(self._clock.mark())
        return marks

    def _taken_s(self) -> list[float]:
        """Return what a message alone took and what a stream of them did, for each size and way."""
        seconds, marks = self._clock.seconds, self._marks
        of_ways = zip(marks[0::3], marks[1::3], marks[2::3], strict=True)
        return [s for one, two, three in of_ways for s in (seconds(one, two), seconds(two, three))]

    def _announce(self, said: Sequence[str]) -> None:
        """Announce the next round, on rank 0, when all have said what the last one took them."""
        if REFUSED in said:
            following = Round()
        else:
            if self._sizes:
                self._learn([msgspec.json.decode(text, type=list[float]) for text in said])
            following = Round(self._next_sizes())
        text = msgspec.json.encode(following).decode()
        self._announcements.announce(text)
        self._stage = Stage.ANNOUNCED

    def _learn(self, of_ranks: Sequence[Sequence[float]]) -> None:
        slowest_s = iter([max(times_s) for times_s in zip(*of_ranks, strict=True)])
        for size in self._sizes:
            spent_s = 0.0
            for way, messages in product(self._command.ways, (1, STREAMED)):
                taken_s = next(slowest_s)
                spent_s += taken_s * (2 if messages == 1 else 1)  # as often as it was sent
                self._samples.append(
                    MessageSample(
                        operation=way.operation,
                        collective=way.collective,
                        sizes_bytes=(size,) * messages,
                        taken_s=taken_s,
                    )
                )
            self._budget.spend(size, spent_s)

    def _next_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the next round: those that must be sent, later what is allowed."""
        sizes = self._command.sizes_bytes
        if self._rounds == 0:
            return sizes[: max(1, self._command.required_sizes)]
        if self._rounds > MOST_REPEATS:
            return ()
        found: list[int] = []
        for size in sizes:
            if self._budget.allows([*found, size]):
                found.append(size)
        return tuple(found)


def refuse_first_round(announcements: Announcements, name: str) -> None:
    """Refuse the first round on a rank that cannot probe at all."""
    _refuse(announcements, _topic(name, 0))


def _topic(name: str, number: int) -> str:
    return f"{name}, round {number}"


def _refuse(announcements: Announcements, topic: str) -> None:
    """Say that this rank sends nothing, so that nobody else does."""
    if announcements.board.rank == 0:
        announcements.announce(msgspec.json.encode(Round()).decode())
    else:
        announcements.report(topic, REFUSED, must_be_heard=True)

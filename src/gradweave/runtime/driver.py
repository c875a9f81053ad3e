"""Carrying out what a planning session asks for, on one rank of many.

Every rank has a driver and a session, and all sessions are told the same at the same step: each
rank says what it has found, rank 0 puts that together and announces it for the step after next (see
`noticeboard`). So sessions ask for the same things at the same steps, and nobody waits for anybody.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from threading import Thread
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from gradweave.errors import GradweaveError
from gradweave.plan import Plan
from gradweave.runtime.instruments import Instruments
from gradweave.runtime.noticeboard import Noticeboard
from gradweave.runtime.survey import RankSurvey
from gradweave.session.candidates import Candidate, shortlist, unplanned_lengths
from gradweave.session.commands import (
    Candidates,
    Command,
    CompressionPrice,
    Failed,
    FindCandidates,
    Install,
    PriceCompression,
    Record,
    Reply,
    SimpleBuckets,
    SlowestRank,
    StepsTaken,
    TakeSteps,
    TimeSteps,
)
from gradweave.session.session import PlanningTask, Session

logger = logging.getLogger(__name__)


class StepTimes(Struct, frozen=True, tag=True):
    """What each of some steps took on one rank."""

    steps_s: tuple[float, ...]


# What one rank has to say on a command; ranks that have nothing to say, say so too.
Part = RankSurvey | StepTimes | Candidates | CompressionPrice | Failed


class Activity(Protocol):
    """This rank's share in carrying out a command, while training goes on."""

    def forward_begins(self, batch_size: int) -> None: ...
    def step_over(self) -> None: ...
    def part(self) -> Part | None:
        """What it has come to; None while it goes on."""

    def agreed(self, parts: Sequence[Any]) -> Reply:
        """What all parts come to, on rank 0; none of them has failed."""

    def close(self) -> None: ...


class Engine(Protocol):
    """What moves gradients; it can be given other buckets between two steps."""

    def install(self, buckets: Plan | SimpleBuckets, order: tuple[str, ...] = ()) -> None: ...


class Driver:
    """Owns a session; the wrapper calls it between two steps, and when a forward pass begins."""

    def __init__(
        self,
        session: Session,
        engine: Engine,
        instruments: Instruments,
        board: Noticeboard,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.session = session
        self._engine, self._instruments, self._board = engine, instruments, board
        self._now_s = now_s
        self._steps = 0
        self._commands = 0
        self._activity: Activity | None = None
        self._taking: int | None = None  # steps that a command still waits for
        self._has_said = self._has_announced = False
        self._announcements: dict[int, str] = {}  # rank 0's own

    @property
    def is_over(self) -> bool:
        return self.session.is_over

    def forward_begins(self, batch_size: int) -> None:
        """A pass with gradients begins; not every one of them becomes a step."""
        if self._activity is not None:
            self._guarded(lambda activity: activity.forward_begins(batch_size))

    def step_over(self) -> None:
        """One more synchronised backward pass is over; all ranks have had as many.

        Buckets may change here.
        """
        self._steps += 1
        if self._steps == 1:
            self._carry_out(self.session.begin())
            return
        try:
            self._go_on()
            heard = self._heard()
        except (RuntimeError, OSError) as error:  # of the store
            logger.warning("planning ends, buckets stay: other ranks cannot be reached: %s", error)
            self.session.abandon("other ranks cannot be reached")
            self.close()
            return
        if heard is not None:
            self._next(heard)

    def stop(self, why: str) -> None:
        """End planning on this rank, at a point that all ranks come to alike."""
        command = self.session.stop(why)
        if isinstance(command, Install):
            self._engine.install(command.buckets, command.order)
        self.close()

    def close(self) -> None:
        """Leave no hook, thread or group of planning's behind; buckets stay."""
        self._end_activity()
        self._instruments.close()

    def _go_on(self) -> None:
        if self._taking is not None:
            self._taking -= 1
            return
        self._guarded(lambda activity: activity.step_over())
        if not self._has_said and (part := self._part()) is not None:
            self._has_said = True
            self._board.say(self._topic, msgspec.json.encode(part).decode())
        if self._board.rank == 0 and self._has_said and not self._has_announced:
            self._announce()

    def _announce(self) -> None:
        """Rank 0: when all have said their parts, the reply, from the step after this one on."""
        said = self._board.everyone(self._topic)
        if said is None:
            return
        parts = [msgspec.json.decode(text, type=Part) for text in said]
        text = msgspec.json.encode(self._agreed(parts)).decode()
        self._board.announce(self._steps + 1, text)
        self._announcements[self._steps + 1] = text
        self._has_announced = True

    def _agreed(self, parts: list[Part]) -> Reply:
        for rank, part in enumerate(parts):
            if isinstance(part, Failed):
                return part if rank == 0 else Failed(f"{part.why} (rank {rank})")
        assert self._activity is not None
        return self._activity.agreed(parts)

    def _heard(self) -> Reply | None:
        """What all ranks are told at this step."""
        if self._taking is not None:
            if self._taking > 0:
                return None
            return StepsTaken(self._instruments.training_step())
        if self._board.rank == 0:
            text = self._announcements.pop(self._steps, None)
        else:
            text = self._board.announced(self._steps)
        return None if text is None else msgspec.json.decode(text, type=Reply)

    def _next(self, reply: Reply) -> None:
        self._end_activity()
        self._carry_out(self.session.reply(reply))

    def _carry_out(self, command: Command | None) -> None:
        while isinstance(command, Install):
            self._engine.install(command.buckets, command.order)
            command = self.session.reply(None)
        if command is None:
            self.close()
            return
        self._commands += 1
        self._has_said = self._has_announced = False
        if isinstance(command, TakeSteps):
            self._taking = command.steps
            if not command.steps:
                self._next(StepsTaken(self._instruments.training_step()))
            return
        self._activity = self._begun(command)

    def _begun(self, command: Command) -> Activity:
        try:
            match command:
                case Record():
                    return self._instruments.survey(command.least_steps)
                case PriceCompression():
                    return self._instruments.pricing(command)
                case TimeSteps():
                    return StepTiming(command, self._now_s)
                case FindCandidates():
                    is_rank_0 = self._board.rank == 0
                    return Finding(command, self.session.task, is_rank_0=is_rank_0)
        except Exception as error:  # noqa: BLE001 training goes on, and the session is told
            return Broken(error)
        raise AssertionError(f"no activity for {command}")

    def _part(self) -> Part | None:
        assert self._activity is not None
        try:
            return self._activity.part()
        except Exception as error:  # noqa: BLE001
            return _failed(error)

    def _guarded(self, act: Callable[[Activity], None]) -> None:
        """A failure to observe must not end a training."""
        if self._activity is None:
            return
        try:
            act(self._activity)
        except Exception as error:  # noqa: BLE001
            self._end_activity()
            self._activity = Broken(error)

    @property
    def _topic(self) -> str:
        return f"command {self._commands}"

    def _end_activity(self) -> None:
        self._taking = None
        if self._activity is not None:
            self._activity.close()
            self._activity = None


class StepTiming:
    """Step by step, how long they take on this rank."""

    def __init__(self, command: TimeSteps, now_s: Callable[[], float]) -> None:
        self._command, self._now_s = command, now_s
        self._ended_s = [now_s()]

    def forward_begins(self, batch_size: int) -> None:
        """Nothing to note."""

    def step_over(self) -> None:
        self._ended_s.append(self._now_s())

    def part(self) -> StepTimes | None:
        taken_s = [end_s - start_s for start_s, end_s in pairwise(self._ended_s)]
        counted_s = taken_s[self._command.settling_steps :][: self._command.steps]
        return StepTimes(tuple(counted_s)) if len(counted_s) == self._command.steps else None

    def agreed(self, parts: Sequence[StepTimes]) -> SlowestRank:
        slowest_s = map(max, zip(*(part.steps_s for part in parts), strict=True))
        return SlowestRank(median(slowest_s))

    def close(self) -> None:
        """Nothing was opened."""


class Finding:
    """Rank 0 computes on a thread of its own, for it may take seconds, and all take its word."""

    def __init__(self, command: FindCandidates, task: PlanningTask, *, is_rank_0: bool) -> None:
        self._command, self._task = command, task
        self._found: Candidates | Failed | None = None if is_rank_0 else Candidates(())
        if is_rank_0:
            Thread(target=self._run, name="gradweave planning", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = Candidates(tuple(self._shortlist()))
        except Exception as error:  # noqa: BLE001 the session is told
            self._found = _failed(error)

    def _shortlist(self) -> list[Candidate]:
        trace, network = self._command.trace, self._command.network
        return shortlist(
            trace,
            network,
            workers=self._task.workers,
            planner=self._task.planner,
            collectives=network.collectives,
            baseline_lengths=unplanned_lengths(
                [tensor.nbytes for tensor in trace.tensors],
                caps_bytes=self._task.baseline_caps_bytes,
                is_declared=self._task.keeps_declared_order,
            ),
            compression=self._command.compression,
            passes=self._task.passes,
        )

    def forward_begins(self, batch_size: int) -> None:
        """Nothing to note."""

    def step_over(self) -> None:
        """It goes on by itself."""

    def part(self) -> Candidates | Failed | None:
        return self._found

    def agreed(self, parts: Sequence[Candidates]) -> Candidates:
        return parts[0]

    def close(self) -> None:
        """The thread ends by itself."""


class Broken:
    """Something that could not be begun, or went wrong on the way."""

    def __init__(self, error: Exception) -> None:
        self._failed = _failed(error)

    def forward_begins(self, batch_size: int) -> None:
        """Nothing to do any more."""

    def step_over(self) -> None:
        """Nothing to do any more."""

    def part(self) -> Failed:
        return self._failed

    def agreed(self, parts: Sequence[object]) -> Failed:
        del parts
        return self._failed

    def close(self) -> None:
        """Nothing is open."""


def _failed(error: Exception) -> Failed:
    if isinstance(error, GradweaveError):
        return Failed(str(error))
    return Failed(f"planning failed: {type(error).__name__}: {error}")

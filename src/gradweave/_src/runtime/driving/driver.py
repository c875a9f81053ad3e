"""Carrying out what a planning session asks for, on one rank of many.

Every rank has a driver and a session, and all sessions are told the same at the same step: each
rank says what it has found, rank 0 puts that together and announces it before its next pass (see
noticeboard.py). So sessions ask for the same things at the same steps, and nobody waits for
anybody.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import msgspec

from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.plan import Plan
from gradweave._src.runtime.driving.activities import Broken, Finding, Part, StepTiming, failure_of
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.runtime.driving.instruments import Instruments
from gradweave._src.runtime.driving.message_log import MessageLog
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.driving.queued_probing import Round
from gradweave._src.runtime.driving.survey import RankSurvey
from gradweave._src.session.commands import (
    Command,
    Failed,
    FindCandidates,
    Install,
    PriceCompression,
    Probe,
    Record,
    Reply,
    SimpleBuckets,
    StepsTaken,
    TakeSteps,
    TimeSteps,
    Told,
)
from gradweave._src.session.session import Session
from gradweave._src.torch_internals import named_range

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What moves gradients; it can be given other buckets between two steps."""

    @property
    def message_log(self) -> MessageLog | None:
        """The log where messages are noted, if they are to be."""
        ...

    def install(
        self,
        buckets: Plan | SimpleBuckets,
        order: tuple[str, ...] = (),
        *,
        notes_messages: bool = False,
    ) -> None: ...

    def stop_noting(self) -> None:
        """Keep no more of what messages take; buckets stay."""
        ...


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
        self._announcements = instruments.announcements
        self._now_s = now_s
        self._began_s = 0.0
        self._commands = 0
        self._activity: Activity | None = None
        self._steps_to_take: int | None = None  # what a TakeSteps still waits for
        self._has_said = self._has_announced = False
        self._why_failed: str | None = None

    @property
    def is_over(self) -> bool:
        return self.session.is_over

    @property
    def has_begun(self) -> bool:
        """Whether a synchronised pass was over since the model was wrapped."""
        return self._passes > 0

    @property
    def steps(self) -> int:
        """How many steps planning has seen: one for each synchronised pass after the first."""
        return max(0, self._passes - 1)

    def forward_begins(self, batch_size: Callable[[], int]) -> None:
        """Note that a pass with gradients begins; not every one of them becomes a step."""
        if self._activity is not None:
            with self._stage_range():
                self._guarded(lambda activity: activity.forward_begins(batch_size()))

    def step_over(self, *, is_counted: bool = False) -> None:
        """Take one step of planning after a synchronised backward pass, when all have had as many.

        Buckets may change here. ``is_counted``: that pass was told of by ``pass_over``.
        """
        with self._stage_range():
            if not is_counted:
                if self._is_first_pass():
                    return
                self._guarded(lambda activity: activity.pass_over())
            self._guarded(lambda activity: activity.step_over())
            self._tell_and_hear(says=True, hears=not is_counted)

    def pass_over(self) -> None:
        """Count a synchronised backward pass in the middle of a step; buckets may change here.

        Other ranks may have begun another step there.
        """
        with self._stage_range():
            if self._is_first_pass():
                return
            self._guarded(lambda activity: activity.pass_over())
            self._tell_and_hear(says=False, hears=True)

    @property
    def _passes(self) -> int:
        """How many synchronised backward passes are over."""
        return self._announcements.passes

    def _is_first_pass(self) -> bool:
        """Count a pass; after the first of all, planning begins."""
        self._announcements.pass_over()
        if self._passes == 1:
            self._began_s = self._now_s()
            self._carry_out(self.session.begin())
        return self._passes == 1

    def _tell_and_hear(self, *, says: bool, hears: bool) -> None:
        if self._steps_to_take is not None and hears:
            self._steps_to_take -= 1
        try:
            if says:
                self._report_part()
            heard = self._heard() if hears else None
        except (RuntimeError, OSError) as error:  # of the store
            self._abandon(error)
            return
        if heard is not None:
            self._next(heard)

    def _stage_range(self) -> AbstractContextManager[object]:
        """Name the present stage of planning for profilers."""
        return named_range("gradweave: planning, %s", self.session.findings.stage)

    def fail(self, why: str) -> None:
        """Have all ranks give up planning at one step, for this one cannot be planned for."""
        self._why_failed = why
        if self._activity is not None:
            self._end_activity()
            self._activity = Broken(RequestError(why))

    def stop(self, why: str) -> None:
        """End planning on this rank, at a point that all ranks come to alike."""
        command = self.session.stop(why)
        if isinstance(command, Install):
            self._install(command)
        self.close()

    def _install(self, command: Install) -> None:
        with named_range("gradweave: other buckets"):
            self._engine.install(
                command.buckets, command.order, notes_messages=command.notes_messages
            )

    def close(self) -> None:
        """Leave no hook, thread or group of planning's behind; buckets stay."""
        self._end_activity()
        self._instruments.close()

    def _report_part(self) -> None:
        """Report this rank's part once it has one; rank 0 then announces the reply to all."""
        if self._activity is None:
            return
        if not self._has_said and (part := self._part()) is not None:
            text = msgspec.json.encode(part).decode()
            must_be_heard = _ends_planning(part)
            # Set before sending: a call that fails may still have reached the store.
            self._has_said = not self._board.is_silent
            self._announcements.report(self._topic, text, must_be_heard=must_be_heard)
        if self._board.rank == 0 and self._has_said and not self._has_announced:
            said = self._board.reports(self._topic)
            if said is not None:
                parts = {rank: msgspec.json.decode(one, type=Part) for rank, one in said.items()}
                told = Told(
                    reply=self._agreed(parts),
                    steps=self._announcements.heard_after - 1,
                    elapsed_s=self._now_s() - self._began_s,
                )
                self._has_announced = True  # set before sending, as above
                self._announcements.announce(msgspec.json.encode(told).decode())

    def _agreed(self, parts: Mapping[int, Part]) -> Reply:
        failed = [(rank, part) for rank, part in parts.items() if isinstance(part, Failed)]
        if failed:
            rank, part = min(failed, key=lambda one: one[1].may_come_of_others)
            return part if rank == 0 else Failed(f"{part.why} (rank {rank})")
        assert self._activity is not None
        try:
            return self._activity.agreed(list(parts.values()))
        except Exception as error:  # noqa: BLE001 training goes on, and all sessions are told
            return failure_of(error)

    def _abandon(self, error: Exception) -> None:
        """Give up where others cannot be heard; raise where they may go on without this rank."""
        where = f"rank {self._board.rank}, step {self._passes + 1}"
        may_go_on = self._has_announced if self._board.rank == 0 else self._has_said
        if may_go_on:
            failure = CollectiveError(
                f"{where}: the store of the process group cannot be reached, and other ranks may "
                f"change their buckets: {error}; start again, or give a plan"
            )
            logger.error("%s", failure)
            raise failure from error
        logger.warning(
            "%s: planning ends, buckets stay: other ranks cannot be reached: %s", where, error
        )
        self.session.abandon("other ranks cannot be reached")
        self._engine.stop_noting()
        self.close()

    def _heard(self) -> Told | Reply | None:
        """Return what all ranks are told at this step; None where there is nothing yet."""
        if self._steps_to_take is not None:
            if self._steps_to_take > 0:
                return None
            return StepsTaken(self._instruments.training_step())
        if not self._has_said:
            return None  # rank 0 waits for what all have to say; asking the store would cost time
        text = self._announcements.heard()
        heard = None if text is None else msgspec.json.decode(text, type=Told | Round)
        if not isinstance(heard, Told):
            return None  # others may go on with probing
        with suppress(RuntimeError, OSError):  # of the store: the announcement holds for all ranks
            self._board.forget(self._topic)  # rank 0 has read it before it announced anything
        return heard

    def _next(self, told: Told | Reply) -> None:
        self._end_activity()
        self._carry_out(self.session.reply(told))

    def _carry_out(self, command: Command | None) -> None:
        while isinstance(command, Install):
            self._install(command)
            command = self.session.reply(None)
        if command is None:
            self.close()
            return
        self._commands += 1
        self._has_said = self._has_announced = False
        if isinstance(command, TakeSteps):
            self._steps_to_take = command.steps
            if not command.steps:
                self._next(StepsTaken(self._instruments.training_step()))
            return
        self._activity = self._begun(command)

    def _begun(self, command: Command) -> Activity:
        try:
            if self._why_failed is not None:
                raise RequestError(self._why_failed)  # noqa: TRY301 as any other failure
            return self._activity_for(command)
        except Exception as error:  # noqa: BLE001 training goes on, and the session is told
            with suppress(Exception):  # what has failed may fail again, and training goes on
                why = str(error) or type(error).__name__
                self._instruments.refuse(command, self._topic, why)
            return Broken(error)

    def _activity_for(self, command: Command) -> Activity:
        match command:
            case Record():
                return self._instruments.survey(command.steps)
            case Probe():
                return self._instruments.probing(command, self._topic)
            case PriceCompression():
                return self._instruments.pricing(command)
            case TimeSteps():
                return StepTiming(command, self._instruments.clock, self._engine.message_log)
            case FindCandidates():
                is_rank_0 = self._board.rank == 0
                return Finding(command, self.session.task, is_rank_0=is_rank_0)
        raise AssertionError(f"no activity for {command}")

    def _part(self) -> Part | None:
        assert self._activity is not None
        try:
            part: Part | None = self._activity.part()
        except Exception as error:  # noqa: BLE001
            return failure_of(error)
        return part

    def _guarded(self, act: Callable[[Activity], None]) -> None:
        """Let the activity act, and note a failure: it must not end the training."""
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
        self._steps_to_take = None
        if self._activity is not None:
            self._activity.close()
            self._activity = None


def _ends_planning(part: Part) -> bool:
    """Return whether one rank that finds this is enough for all to give up."""
    return isinstance(part, Failed) or (isinstance(part, RankSurvey) and part.is_reordered)

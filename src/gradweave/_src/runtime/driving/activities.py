"""What ranks do for a planning session's commands, apart from recording and pricing."""

from collections.abc import Sequence
from threading import Thread

from msgspec import Struct

from gradweave._src.clocks import Clock, have_passed
from gradweave._src.errors import GradweaveError
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.runtime.driving.message_log import MessageLog, NotedMessage
from gradweave._src.runtime.driving.probing import RankProbe
from gradweave._src.runtime.driving.survey import RankSurvey
from gradweave._src.session.candidates import (
    Candidate,
    shortlist,
    travels_for,
    unplanned_lengths,
)
from gradweave._src.session.commands import (
    Candidates,
    CompressionPrice,
    Failed,
    FindCandidates,
    StepsTimed,
    TimeSteps,
)
from gradweave._src.session.learning import MessageTimes, samples_of
from gradweave._src.session.task import PlanningTask
from gradweave._src.session.trials import HOPELESS_AFTER_STEPS


class StepTimes(Struct, frozen=True, tag=True):
    """What each of some steps took on one rank, and when its messages travelled."""

    steps_s: tuple[float, ...]
    messages: tuple[tuple[MessageTimes, ...], ...]


# What one rank reports on a command. Every rank reports, also one that has found nothing.
Part = RankSurvey | RankProbe | StepTimes | Candidates | CompressionPrice | Failed


class StepTiming(Activity):
    """Times steps one by one on this rank, with what is in the log of messages.

    An accelerator's steps are looked at when they are over there: the host, which asks for them,
    may be steps ahead.
    """

    def __init__(self, command: TimeSteps, clock: Clock, log: MessageLog | None) -> None:
        self._command, self._clock, self._log = command, clock, log
        self._ends = [clock.mark()]
        self._noted: list[tuple[NotedMessage, ...]] = []
        self._taken_s: list[float] = []
        self._messages: list[tuple[MessageTimes, ...]] = []
        self._has_answered = False

    def step_over(self) -> None:
        if self._has_answered:
            return  # rank 0 may never have heard all, and steps go on
        self._ends.append(self._clock.mark())
        self._noted.append(() if self._log is None else self._log.take())

    def part(self) -> StepTimes | None:
        self._look()
        first = self._command.settling_steps
        counted_s = self._taken_s[first:][: self._command.steps]
        if len(counted_s) < self._command.steps and not self._is_hopeless(counted_s):
            return None
        self._has_answered = True
        messages = self._messages[first:][: len(counted_s)]
        return StepTimes(tuple(counted_s), tuple(messages))

    def _look(self) -> None:
        """Look at the steps that are over by now."""
        while self._noted and have_passed(self._clock, self._ends[:2]):
            messages = () if self._log is None else self._log.times(self._noted[0])
            if messages is None:
                return
            self._messages.append(messages)
            self._taken_s.append(self._clock.seconds(self._ends[0], self._ends[1]))
            del self._noted[0], self._ends[0]

    def _is_hopeless(self, steps_s: Sequence[float]) -> bool:
        most_s = self._command.hopeless_s
        return most_s is not None and len(steps_s) >= HOPELESS_AFTER_STEPS and min(steps_s) > most_s

    def agreed(self, parts: Sequence[StepTimes]) -> StepsTimed:
        """Sum up the steps that all have timed; some ranks may have given up before others."""
        slowest_s = map(max, zip(*(part.steps_s for part in parts), strict=False))
        by_step = zip(*(part.messages for part in parts), strict=False)
        samples = [sample for ranks in by_step for sample in samples_of(ranks)]
        return StepsTimed(tuple(slowest_s), tuple(samples))


class Finding(Activity):
    """Rank 0 computes candidate plans on a thread; the other ranks accept its result."""

    def __init__(self, command: FindCandidates, task: PlanningTask, *, is_rank_0: bool) -> None:
        self._command, self._task = command, task
        self._found: Candidates | Failed | None = None if is_rank_0 else Candidates(())
        if is_rank_0:
            Thread(target=self._run, name="gradweave planning", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = Candidates(tuple(self._shortlist()))
        except Exception as error:  # noqa: BLE001 the session is told
            self._found = failure_of(error)

    def _shortlist(self) -> list[Candidate]:
        trace, network = self._command.trace, self._command.network
        return shortlist(
            trace,
            network,
            workers=self._task.workers,
            planner=self._task.planner,
            travels=travels_for(self._task, network, self._command.compression),
            baseline_lengths=unplanned_lengths(
                [tensor.nbytes for tensor in trace.tensors],
                caps_bytes=self._task.baseline_caps_bytes,
                is_declared=self._task.keeps_declared_order,
            ),
            passes=self._task.passes,
        )

    def part(self) -> Candidates | Failed | None:
        return self._found

    def agreed(self, parts: Sequence[Candidates]) -> Candidates:
        return parts[0]


class Broken(Activity):
    """Something that could not be begun, or went wrong on the way."""

    def __init__(self, error: Exception) -> None:
        self._failed = failure_of(error)

    def part(self) -> Failed:
        return self._failed

    def agreed(self, parts: Sequence[object]) -> Failed:
        del parts
        return self._failed


def failure_of(error: Exception) -> Failed:
    if isinstance(error, GradweaveError):
        return Failed(str(error))
    return Failed(f"planning failed: {type(error).__name__}: {error}")

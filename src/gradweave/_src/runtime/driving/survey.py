"""When gradients are ready, recorded on every rank while the model trains."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median_low

from msgspec import Struct
from torch import nn

from gradweave._src.measure.backward import (
    Iteration,
    Marks,
    RankTimes,
    observing,
    rank_times,
    slowest_rank,
    trace_of,
)
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.session.commands import Failed, Recorded, Unplannable

# torch makes its lasting buckets before the second pass of a reducer, and the third allocates.
WARMUP_STEPS = 2


class RankSurvey(Struct, frozen=True, kw_only=True, tag=True):
    """What one rank has recorded."""

    times: RankTimes
    order: tuple[str, ...]  # in which gradients came first
    is_reordered: bool  # they came in another order later
    batch_size: int
    passes: int  # that began in a step


class Survey(Activity):
    """Records so many steps, after some for warming up; ``close`` is called at its end."""

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        *,
        steps: int,
        keeps_declared_order: bool,
        close: Callable[[], None],
    ) -> None:
        self._name, self._parameters = type(module).__name__, parameters
        self._keeps_declared_order = keeps_declared_order
        self._steps_left, self._to_record = WARMUP_STEPS + steps, steps
        self._marked: list[Marks] = []  # what is not over yet
        self._observed: list[Iteration] = []
        self._last: Marks | None = None  # of the step that is not over yet
        self._batch_size = 1
        self._passes, self._passes_by_step = 0, list[int]()
        self._open = ExitStack()
        self._open.callback(close)
        self._observer = self._open.enter_context(observing(module, parameters))

    def forward_begins(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._passes += 1
        self._look()

    def step_over(self) -> None:
        self._look()
        marks, self._last = self._last, None
        passes, self._passes = self._passes, 0
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        if self._steps_left < self._to_record and marks is not None:
            self._marked.append(marks)
            self._passes_by_step.append(max(1, passes))
        if self._steps_left == 0:
            self._open.close()  # until all ranks have been told there is nothing more to note

    def _look(self) -> None:
        """Keep what was marked if it had a backward pass: more may follow before a step is over.

        This rank may call the model without one, or without synchronisation.
        """
        marks = self._observer.marks()
        if marks is not None and marks.ready:
            self._last = marks
        self._observer.begin()

    def part(self) -> RankSurvey | Failed | None:
        """Return what this rank has found; None while it goes on, here or on an accelerator."""
        while self._marked and self._marked[0].have_passed():
            self._observed.append(self._marked.pop(0).iteration())
        if self._steps_left or self._marked:
            return None
        if not self._observed:
            return Failed("no step had a backward pass")
        orders = [tuple(one.ready_s) for one in self._observed]
        return RankSurvey(
            times=rank_times(self._observed, self._parameters),
            order=orders[0],
            is_reordered=any(order != orders[0] for order in orders),
            batch_size=self._batch_size,
            passes=median_low(self._passes_by_step),
        )

    def agreed(self, parts: Sequence[RankSurvey]) -> Recorded | Unplannable:
        """Return what ranks have found together, in the order in which torch would send.

        That is rank 0's, or, turned round, that of declaration.
        """
        order = parts[0].order
        if self._keeps_declared_order:
            order = tuple(reversed(self._parameters))
        elif any(part.is_reordered for part in parts):
            return Unplannable("gradients do not come in the same order in every step", order)
        if set(order) != set(self._parameters):
            return Unplannable("some parameters get no gradient", order)
        trace = trace_of(
            slowest_rank([part.times for part in parts]),
            self._parameters,
            name=self._name,
            batch_size=parts[0].batch_size,
            iterations=self._to_record,
        )
        return Recorded(trace.in_order(order), parts[0].passes)

    def close(self) -> None:
        self._open.close()

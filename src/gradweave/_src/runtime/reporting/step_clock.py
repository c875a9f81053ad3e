"""How long this rank takes for each phase of its steps."""

import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradweave._src.clocks import Clock, have_passed
from gradweave._src.phases import PHASES, Phase, Phases
from gradweave._src.results import StageBegin
from gradweave._src.torch_internals import (
    all_requiring_grad,
    remove_gradient_hook,
    when_backward_ends,
)

# The last steps whose phases are kept: enough for medians that one slow step does not move.
KEPT_STEPS = 64
# How many steps' marks may pile up before they are turned into seconds, where nobody asks.
LOOKED_AT_AFTER = 16

Marks = list[tuple[Phase, object]]


class StepClock:
    """Marks where phases begin, as cheaply as a clock can be read; asked for lengths later.

    ``stages`` are those of planning, as somebody says that they begin.
    """

    def __init__(self, clock: Clock) -> None:
        self.begun = 0  # forward passes whose gradients are to travel; whoever calls counts them
        self.steps = 0  # how many have ended
        self.stages: list[StageBegin] = []
        self._clock = clock
        self._step_s = array("d")  # as far as they are known, the first one's too
        self._ends: deque[object] = deque()  # from the last step that is known on
        self._kept: deque[tuple[Marks, object]] = deque(maxlen=KEPT_STEPS)
        self._marks: Marks = []  # of the step under way; empty before the first has ended
        self._phase: Phase | None = None
        self._is_synchronised = self._is_whole = False

    @property
    def step_s(self) -> Sequence[float]:
        """How long each step since the first took, as far as that is known without waiting."""
        self._look()
        return self._step_s[1:]

    @property
    def last_step_s(self) -> float | None:
        """Return how long the last step took; None where no second one has ended."""
        self._look()
        return self._step_s[-1] if len(self._step_s) > 1 else None

    def all_step_s(self) -> list[float]:
        """Return how long all steps took, the first one included; waits for those under way."""
        if self._ends:
            self._clock.wait_until(self._ends[-1])
        self._look()
        return list(self._step_s)

    def _look(self) -> None:
        """Look at the steps that are over by now, on an accelerator later than asked for."""
        ends, clock = self._ends, self._clock
        while len(ends) > 1 and have_passed(clock, (ends[0], ends[1])):
            self._step_s.append(clock.seconds(ends.popleft(), ends[0]))

    def stage_begins(self, stage: str) -> None:
        """Call it where a stage of planning may have begun; phases from before are forgotten."""
        before = self.stages
        if before and before[-1].stage == stage:
            return
        self.stages = [begin for begin in before if begin.step < self.steps]
        if not self.stages or self.stages[-1].stage != stage:
            self.stages.append(StageBegin(stage, self.steps))
        self.forget()

    @property
    def misses_end(self) -> bool:
        """Whether there was a forward pass whose backward pass, if any, had no end to be seen."""
        return self._is_synchronised and self._phase == "backward"

    def forward_begins(self, *, is_synchronised: bool) -> None:
        if not self._ends:
            self._ends.append(self._clock.mark())
        # In any other phase the last pass had no end that was seen, so its step is not whole.
        self._is_whole &= self._phase == "input" or not self._is_synchronised
        self._is_synchronised = is_synchronised
        self._begin("forward")

    def forward_ends(self) -> None:
        self._begin("backward")

    def gradients_ready(self) -> None:
        """Note that this rank has computed its last gradient; of several calls the last counts."""
        if self._is_synchronised and self._phase in {"backward", "network"}:
            if self._phase == "network":
                self._marks[-1:] = []
            self._begin("network")

    def messages_done(self) -> None:
        """Note that nothing of this pass is on its way any more: the step is over."""
        if not self._is_synchronised or self._phase not in {"backward", "network"}:
            return
        end = self._clock.mark()
        self.steps += 1
        self._ends.append(end)
        if len(self._ends) > LOOKED_AT_AFTER:
            self._look()
        if self._marks and self._is_whole:
            self._kept.append((self._marks, end))
        self._marks, self._phase, self._is_whole = [("input", end)], "input", True

    def step_ended_unseen(self) -> None:
        """Count a step that is over, and whose end nobody saw; its phases are not known."""
        self.messages_done()
        if self._kept and self._kept[-1][1] is self._marks[0][1]:
            self._kept.pop()
        self._is_whole = False  # nor those of the next one, whose beginning is late

    def waits(self, wait: Callable[[], None]) -> None:
        """Let this rank wait for the network in the middle of another phase."""
        phase = self._phase
        self._begin("network")
        wait()
        if phase is not None:
            self._begin(phase)

    def phases(self) -> list[Phases]:
        """Return the phases of the last steps, as far as all of them were seen and are over."""
        kept = [one for one in self._kept if self._clock.has_passed(one[1])]
        return [_lengths(self._clock, marks, end) for marks, end in kept]

    def last_phases(self) -> Phases | None:
        """Return the phases of the last step that is told without waiting for an accelerator."""
        for marks, end in reversed(self._kept):
            if self._clock.has_passed(end):
                return _lengths(self._clock, marks, end)
        return None

    def looks_away(self) -> None:
        """Do not time the pass that begins: it is captured into a graph and does not run now."""
        self._marks, self._phase, self._is_synchronised, self._is_whole = [], None, False, False

    def forget(self) -> None:
        """Keep no phases of steps up to now: something has changed."""
        self._kept.clear()

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        if self._marks:
            self._marks.append((phase, self._clock.mark()))


def _lengths(clock: Clock, marks: Marks, end: object) -> Phases:
    lengths_s = dict.fromkeys(PHASES, 0.0)
    ends = [*(mark for _, mark in marks[1:]), end]
    for (phase, begin), until in zip(marks, ends, strict=True):
        lengths_s[phase] += max(0.0, clock.seconds(begin, until))
    return Phases(**{f"{phase}_s": length_s for phase, length_s in lengths_s.items()})


class LastGradient:
    """Tells a clock when this rank's last gradient is there, and when torch has averaged all.

    There is one hook, on the parameter whose gradient is expected last: a step pays for no more.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._expected: weakref.ref[nn.Parameter] | None = None
        self._parameter: weakref.ref[nn.Parameter] | None = None  # which has the hook
        self._handle: RemovableHandle | None = None
        self._asked: tuple[int, list[int]] = 0, []  # with how many steps, and what torch had noted

    def expect(self, parameter: nn.Parameter) -> None:
        """Expect this parameter's gradient last; said again, it does not undo what was seen."""
        if self._expected is None or self._expected() is not parameter:
            self._expected = weakref.ref(parameter)
            self._move_to(parameter)

    def look_again(self, noted: list[int], in_order: Sequence[nn.Parameter]) -> None:
        """Move the hook before a forward pass, where the pass before had no end that could be seen.

        ``noted`` is what torch has noted of gradients of the last synchronised pass, for parameters
        ``in_order``. Where that is another pass than when this was asked last, and no end was seen
        since, it was missed: the parameter that was expected last may get no gradient at all.
        """
        steps, before = self._asked
        if any(noted) and noted != before and steps == self._clock.steps:
            self._move_to(in_order[noted.index(max(noted))])
            self._clock.step_ended_unseen()
        self._asked = self._clock.steps, noted

    def _move_to(self, parameter: nn.Parameter) -> None:
        self.close()
        note = unserializable_hook(partial(_note, self._clock))  # type: ignore[no-untyped-call]
        with all_requiring_grad([parameter]):
            self._handle = parameter.register_hook(note)  # type: ignore[no-untyped-call]
        self._parameter = weakref.ref(parameter)

    def close(self) -> None:
        parameter = None if self._parameter is None else self._parameter()
        if parameter is not None and self._handle is not None:
            remove_gradient_hook(parameter, self._handle)
        self._parameter = self._handle = None


def _note(clock: StepClock, gradient: torch.Tensor) -> None:
    del gradient
    clock.gradients_ready()
    # torch asks for its own call, which waits for all buckets, after this.
    when_backward_ends(partial(when_backward_ends, clock.messages_done))

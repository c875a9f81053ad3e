"""What a training leaves behind beside its timelines: its steps, and how it was planned."""

from itertools import pairwise

from msgspec import Struct

from gradweave._src.checks import LARGEST, require_text
from gradweave._src.errors import RequestError
from gradweave._src.phases import Phases
from gradweave._src.results import StageBegin


class Steps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long every step of a training took, and what ranks did in the last ones.

    Steps are counted from 0. They are rank 0's; the first one began with its forward pass, every
    other where the one before it had ended.

    Attributes:
        step_s: seconds of each step.
        stages: the stages of planning, as it went on.
        phases: for each rank, medians over the last steps; None where no step was seen whole.
    """

    step_s: tuple[float, ...]
    stages: tuple[StageBegin, ...]
    phases: tuple[Phases | None, ...]

    def __post_init__(self) -> None:
        if not self.step_s:
            raise RequestError("step_s must not be empty")
        if not all(0 <= step_s <= LARGEST for step_s in self.step_s):
            raise RequestError("step_s must be numbers >= 0")
        begins = [begin.step for begin in self.stages]
        if any(after <= before for before, after in pairwise((-1, *begins, LARGEST))):
            raise RequestError("stages must begin one after the other, from 0 on")
        if not self.phases:
            raise RequestError("phases must not be empty; there is at least one rank")

    @property
    def workers(self) -> int:
        """How many ranks there were."""
        return len(self.phases)


class TriedPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that was timed in training steps.

    Attributes:
        planner: who made it.
        messages: how many it sends in a step.
        ways: how they travel.
        predicted_s: seconds that a step was predicted to take.
        rounds_s: seconds that a step took, each time that it was tried.
        is_baseline: whether it is what is sent without planning.
        is_chosen: whether it was chosen.
    """

    planner: str
    messages: int
    ways: tuple[str, ...]
    predicted_s: float
    rounds_s: tuple[float, ...]
    is_baseline: bool
    is_chosen: bool


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How planning went, for people and pages; `findings.json` in the folder of a training.

    Attributes:
        stage: how far it came.
        planning_steps: steps that planning took; None where there was none, or it goes on.
        planning_s: seconds that planning took; None likewise.
        baseline_step_s: seconds of a step before planning.
        step_s: seconds of a step when the plan was chosen.
        gain: how many times as fast steps became, of turns that can be compared.
        trials: the plans that were timed.
        note: why there is no plan, or none better than what the wrapper began with.
        explanation: all of it in a few sentences.
    """

    stage: str
    planning_steps: int | None
    planning_s: float | None
    baseline_step_s: float | None
    step_s: float | None
    gain: float | None
    trials: tuple[TriedPlan, ...]
    note: str | None
    explanation: str

    def __post_init__(self) -> None:
        require_text(self, "stage", "explanation")

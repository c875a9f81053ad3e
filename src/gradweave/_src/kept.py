"""What a training leaves behind beside its timelines: its steps, and how it was planned."""

from itertools import pairwise

from msgspec import Struct

from gradweave._src.checks import LARGEST, require_text
from gradweave._src.phases import Phases
from gradweave._src.results import StageBegin


class Steps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long every step of a training took, and what ranks did in the last ones.

    Steps are counted from 0. They are rank 0's; the first one began with its forward pass, every
    other where the one before it had ended.
    """

    step_s: tuple[float, ...]
    stages: tuple[StageBegin, ...]  # of planning, as it went on
    # By rank: medians over the last steps of the last stage. None: no step was seen whole.
    phases: tuple[Phases | None, ...]

    def __post_init__(self) -> None:
        if not self.step_s:
            raise ValueError("step_s must not be empty")
        if not all(0 <= step_s <= LARGEST for step_s in self.step_s):
            raise ValueError("step_s must be numbers >= 0")
        begins = [begin.step for begin in self.stages]
        if any(after <= before for before, after in pairwise((-1, *begins, LARGEST))):
            raise ValueError("stages must begin one after the other, from 0 on")
        if not self.phases:
            raise ValueError("phases must not be empty; there is at least one rank")

    @property
    def workers(self) -> int:
        return len(self.phases)


class TriedPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan in real training steps."""

    planner: str
    messages: int
    ways: tuple[str, ...]  # how its messages travel
    predicted_s: float
    rounds_s: tuple[float, ...]  # what a step took, each time that it was tried
    is_baseline: bool  # what is sent without planning
    is_chosen: bool


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How planning went, for people and pages; `findings.json` in the folder of a training."""

    stage: str
    planning_steps: int | None  # that planning took; None: there was none, or not yet
    planning_s: float | None
    baseline_step_s: float | None  # what a step took before planning
    step_s: float | None  # what it took when the plan was chosen
    gain: float | None  # how many times as fast that is
    trials: tuple[TriedPlan, ...]
    note: str | None  # why there is no plan, or none better than what the wrapper began with
    explanation: str

    def __post_init__(self) -> None:
        require_text(self, "stage", "explanation")

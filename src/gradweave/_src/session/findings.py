"""What planning has found out: measured, tried, chosen."""

from enum import StrEnum

from msgspec import Struct

from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.session.compression_worth import Verdict
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.session.trials import Trial, times_as_fast
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace


class Stage(StrEnum):
    """How far planning has come; its members are texts, such as "settled".

    Attributes:
        NOT_BEGUN: no step was taken yet.
        RECORDING: it is recorded when gradients are ready.
        LEARNING: messages tell what the network costs.
        WARMING_UP: the density of compression still changes; a plan for the present one is in use.
        TRYING: plans are timed in training steps.
        SETTLED: planning is over, with a plan or without.
    """

    NOT_BEGUN = "not begun"
    RECORDING = "recording"
    LEARNING = "learning"
    WARMING_UP = "warming up"
    TRYING = "trying"
    SETTLED = "settled"


class Findings(Struct, frozen=True, kw_only=True):
    """What planning has found out so far; ``findings()`` of a wrapper returns it.

    What is not known yet, or will never be, is None; ``note`` then says why.

    Attributes:
        stage: how far planning has come.
        steps: how many steps planning has seen since the first one.
        elapsed_s: seconds that those steps took, as far as planning was told.
        most_steps: the step after which planning ends at the latest.
        waits_for: what planning waits for, in words, while it goes on.
        trace: when each gradient is ready, as recorded on the slowest rank.
        passes: backward passes in a step; the trace is of the last, others only add to gradients.
        network: what messages cost, as learnt from this training.
        trials: the plans that were timed in training steps.
        plan: the plan in use.
        is_given: whether the user has given the plan.
        is_remembered: whether the plan is that of an earlier run.
        predicted: the predicted timeline of an iteration with the plan.
        baseline_step_s: seconds that a step took with the buckets that the wrapper began with.
        step_s: seconds that a step took when the plan was chosen.
        planning_steps: how many steps planning took; None until it is over, or if there was none.
        planning_s: seconds that those steps took.
        may_round_to: the formats that plans may round gradients to, such as "bf16".
        is_whole: whether the whole model is one bucket, as ``whole_model`` of compression asks for.
        worth: whether compression pays.
        slow_ranks: who was slow when ``slow_ranks()`` was last called.
        note: why there is no plan, or none better than at first, or no verdict on compression.
    """

    stage: Stage = Stage.NOT_BEGUN
    steps: int = 0
    elapsed_s: float = 0.0
    most_steps: int | None = None
    waits_for: str | None = None
    trace: Trace | None = None
    passes: int = 1
    network: Network | None = None
    trials: tuple[Trial, ...] = ()
    plan: Plan | None = None
    is_given: bool = False
    is_remembered: bool = False
    predicted: Timeline | None = None
    baseline_step_s: float | None = None
    step_s: float | None = None
    planning_steps: int | None = None
    planning_s: float | None = None
    may_round_to: tuple[str, ...] = ()
    is_whole: bool = False
    worth: Verdict | None = None
    slow_ranks: tuple[SlowRank, ...] = ()
    note: str | None = None

    @property
    def gain(self) -> float | None:
        """How many times as fast as at first a step is; None where nobody measured.

        It is smaller than the ratio of ``baseline_step_s`` and ``step_s`` if only the former was
        measured while messages were noted, and that accounts for some of it.
        """
        if self.step_s is None:
            return None
        baseline = next((one for one in self.trials if one.candidate.is_baseline), None)
        chosen = next((one for one in self.trials if one.candidate.plan == self.plan), None)
        return None if baseline is None or chosen is None else times_as_fast(chosen, baseline)

    @property
    def regret_steps(self) -> float | None:
        """What planning cost: how much longer its steps took than steps of the chosen plan.

        It is counted in such steps; docs/measuring.md has more.
        """
        if self.planning_s is None or self.planning_steps is None or self.step_s is None:
            return None
        return self.planning_s / self.step_s - self.planning_steps

    @property
    def are_reusable(self) -> bool:
        """Whether they make a recipe; before planning has settled, a plan may be a passing one."""
        return self.stage is Stage.SETTLED and None not in (self.plan, self.trace, self.network)


def whole_step_s(found: Findings, last_pass_s: float) -> float:
    """Return what a step takes whose last pass takes so long, messages included."""
    others_s = 0.0 if found.trace is None else (found.passes - 1) * found.trace.compute_s
    return last_pass_s + others_s


def recipe_of(found: Findings, *, workers: int, device: str, why_not: str) -> Recipe:
    """Return what a restart can reuse, or raise RequestError with ``why_not``."""
    if not found.are_reusable:
        raise RequestError(f"there is no recipe: {why_not}")
    assert found.plan is not None
    assert found.trace is not None
    assert found.network is not None
    return Recipe(
        workers=workers,
        device=device,
        plan=found.plan,
        trace=found.trace,
        network=found.network,
        step_s=found.step_s,
    )

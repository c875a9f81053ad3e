"""What planning has found out: measured, tried, chosen."""

from enum import StrEnum

from msgspec import Struct

from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.session.compression import Verdict
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.session.trials import Trial
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace


class Stage(StrEnum):
    """How far planning has come; its members are texts, such as "settled"."""

    NOT_BEGUN = "not begun"
    RECORDING = "recording"  # when gradients are ready
    LEARNING = "learning"  # what messages cost
    WARMING_UP = "warming up"  # by a plan for the present density
    TRYING = "trying"
    SETTLED = "settled"


class Findings(Struct, frozen=True, kw_only=True):
    """What planning has found out so far; ``findings()`` of a wrapper returns it.

    What is not known yet, or will never be, is None; ``note`` then says why.
    """

    stage: Stage = Stage.NOT_BEGUN
    steps: int = 0  # taken by now, since the first
    elapsed_s: float = 0.0  # as far as it was told
    most_steps: int | None = None  # after which planning ends, while it goes on
    waits_for: str | None = None  # in words, while planning goes on
    trace: Trace | None = None
    passes: int = 1  # in a step; the trace is of the last, the others only add to gradients
    network: Network | None = None
    trials: tuple[Trial, ...] = ()
    plan: Plan | None = None
    is_given: bool = False  # the plan, by the user
    is_remembered: bool = False  # the plan, by an earlier run
    predicted: Timeline | None = None
    baseline_step_s: float | None = None  # what a step took with what the wrapper began with
    step_s: float | None = None  # what a step took when the plan was chosen
    planning_steps: int | None = None  # that planning took; None: there was none, or not yet
    planning_s: float | None = None
    is_whole: bool = False  # one bucket, without a plan: everything is selected from at once
    worth: Verdict | None = None  # of compression
    slow_ranks: tuple[SlowRank, ...] = ()  # when all ranks were last asked
    # Why there is no plan, or none better than what the wrapper began with, or no verdict.
    note: str | None = None

    @property
    def gain(self) -> float | None:
        """How many times as fast as at first a step is; None where nobody measured."""
        if self.step_s is None or self.baseline_step_s is None:
            return None
        return self.baseline_step_s / self.step_s

    def step_of_s(self, iteration_s: float) -> float:
        """Return what a step takes whose last pass takes so long, messages included."""
        others_s = 0.0 if self.trace is None else (self.passes - 1) * self.trace.compute_s
        return iteration_s + others_s

    @property
    def regret_steps(self) -> float | None:
        """What planning cost: how much longer its steps took than by the plan that was chosen.

        It is in units of such steps; docs/measuring.md has more.
        """
        if self.planning_s is None or self.planning_steps is None or self.step_s is None:
            return None
        return self.planning_s / self.step_s - self.planning_steps

    @property
    def are_reusable(self) -> bool:
        """Whether there is a recipe: before planning has settled, a plan may be one for a while."""
        return self.stage is Stage.SETTLED and None not in (self.plan, self.trace, self.network)

    def recipe(self, *, workers: int, device: str, why_not: str) -> Recipe:
        """Return what a restart can reuse, or raise RequestError with ``why_not``."""
        if not self.are_reusable:
            raise RequestError(f"there is no recipe: {why_not}")
        assert self.plan is not None
        assert self.trace is not None
        assert self.network is not None
        return Recipe(
            workers=workers,
            device=device,
            plan=self.plan,
            trace=self.trace,
            network=self.network,
            step_s=self.step_s,
        )

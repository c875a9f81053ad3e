"""What planning has found out: measured, tried, chosen."""

from enum import StrEnum

from msgspec import Struct

from gradweave.errors import RequestError
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.session.compression import Verdict
from gradweave.session.trials import Trial
from gradweave.timeline import Timeline
from gradweave.trace import Trace


class Stage(StrEnum):
    """How far planning has come."""

    NOT_BEGUN = "not begun"
    RECORDING = "recording"
    WARMING_UP = "warming up"  # by a plan for the present density
    TRYING = "trying"
    SETTLED = "settled"


class Findings(Struct, frozen=True, kw_only=True):
    """What the session has found out so far."""

    stage: Stage = Stage.NOT_BEGUN
    trace: Trace | None = None
    network: Network | None = None
    trials: tuple[Trial, ...] = ()
    plan: Plan | None = None
    is_given: bool = False  # the plan, by the user
    is_remembered: bool = False  # the plan, by an earlier run
    predicted: Timeline | None = None
    step_s: float | None = None  # what a step took when the plan was chosen
    is_whole: bool = False  # one bucket, without a plan: everything is selected from at once
    worth: Verdict | None = None  # of compression
    note: str | None = None  # why there is no plan, or no verdict on the whole model

    def recipe(self, *, workers: int, device: str, why_not: str) -> Recipe:
        """Return what a restart can reuse, or raise RequestError with ``why_not``."""
        is_settled = self.stage is Stage.SETTLED  # otherwise it may be a plan for a while
        if not is_settled or self.plan is None or self.trace is None or self.network is None:
            raise RequestError(f"there is no recipe: {why_not}")
        return Recipe(
            workers=workers,
            device=device,
            plan=self.plan,
            trace=self.trace,
            network=self.network,
            step_s=self.step_s,
        )

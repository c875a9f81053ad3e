"""What planning has found out: measured, tried, chosen."""

from msgspec import Struct

from gradweave.errors import RequestError
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.thinning import Verdict
from gradweave.runtime.trials import Trial
from gradweave.timeline import Timeline
from gradweave.trace import Trace


class Findings(Struct, kw_only=True):
    """What the course has found out so far."""

    trace: Trace | None = None
    network: Network | None = None
    trials: list[Trial] = []
    plan: Plan | None = None
    is_given: bool = False  # the plan, by the user
    predicted: Timeline | None = None
    step_s: float | None = None  # what a step took when the plan was chosen
    is_whole: bool = False  # one bucket, without a plan: everything is selected from at once
    worth: Verdict | None = None  # of compression
    stage: str = "not begun"
    note: str | None = None  # why there is no plan, or no verdict on the whole model

    def recipe(self, *, workers: int, device: str, why_not: str) -> Recipe:
        """``why_not``: what to say where there is none yet."""
        is_settled = self.stage == "settled"  # otherwise it may be a plan for a while
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

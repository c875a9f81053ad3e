"""What a wrapper's planning has found, for whoever outlives the wrapper."""

import weakref

from msgspec.structs import replace

from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.driving.driver import Driver
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings, Stage, recipe_of
from gradweave._src.session.session import Session


class PlanningAccount:
    """What tells the same of planning as its wrapper does, and outlives that wrapper.

    ``account()`` of a wrapper returns it. It keeps nothing of torch's alive, so libraries that drop
    their wrapper at the end of a training can still say what was found.
    """

    def __init__(
        self,
        session: Session | None,
        driver: Driver | None,
        *,
        why_unplanned: str | None,
        workers: int,
        device: str,
        baseline: str,
    ) -> None:
        self._session = session
        self._driver = None if driver is None else weakref.ref(driver)
        self._why_unplanned, self._baseline = why_unplanned, baseline
        self._workers, self._device = workers, device

    @property
    def plan(self) -> Plan | None:
        """The plan in use. It is None while planning goes on, and where nothing is planned.

        While the density of compression warms up, it is the best plan for the present density.
        """
        return self.findings().plan

    def findings(self) -> Findings:
        """Return what planning has found out so far."""
        if self._session is None:
            return Findings(stage=Stage.SETTLED, note=self._why_unplanned)
        found = self._session.findings
        driver = None if self._driver is None else self._driver()
        if driver is None or driver.is_over:
            return found
        return replace(found, steps=driver.steps)

    def explain(self) -> str:
        """Return a few sentences: what was measured, tried and chosen, and what that gains."""
        return explanation(self.findings(), workers=self._workers, baseline=self._baseline)

    def recipe(self) -> Recipe:
        """Return the plan with what it was made from, for ``plan=`` of a restart.

        Raises:
            RequestError: if there is no recipe: planning goes on, or has chosen nothing.
        """
        found, why_not = self.findings(), ""
        if not found.are_reusable:  # to explain takes long, and checkpoints ask for recipes
            why_not, _, _ = self.explain().partition("\n")
        return recipe_of(found, workers=self._workers, device=self._device, why_not=why_not)

    def recipe_text(self) -> str:
        """Return the recipe as checkpoints keep it; an empty text where there is none yet."""
        return self.recipe().to_text() if self.findings().are_reusable else ""

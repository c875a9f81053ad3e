"""What a wrapper's planning has found, for whoever outlives the wrapper."""

import weakref
from collections.abc import Sequence

from msgspec.structs import replace

from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.driver import Driver
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.session import Session


class PlanningAccount:
    """Tells the same as the wrapper it is of, and keeps nothing of torch's alive.

    ``driver`` is what plans, as long as that goes on.
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
        """What is carried out; None while it is being found, and where nothing is planned.

        While densities warm up it is the best one for the present density.
        """
        return self.findings().plan

    def findings(self) -> Findings:
        """What planning has found out so far."""
        if self._session is None:
            return Findings(stage=Stage.SETTLED, note=self._why_unplanned)
        found = self._session.findings
        driver = None if self._driver is None else self._driver()
        if driver is None or driver.is_over:
            return found
        return replace(found, steps=driver.steps)

    def explain(self, *, who_is_slow: Sequence[str] = ()) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        return explanation(
            self.findings(),
            workers=self._workers,
            baseline=self._baseline,
            who_is_slow=who_is_slow,
        )

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self.findings().recipe(
            workers=self._workers, device=self._device, why_not=self.explain()
        )

    def recipe_text(self) -> str:
        """The recipe as what checkpoints keep; empty where there is none, or none yet."""
        return self.recipe().to_text() if self.findings().are_reusable else ""

"""What every wrapper tells about itself."""

import weakref

import torch
import torch.distributed as dist
from msgspec.structs import replace

from gradweave.errors import RequestError
from gradweave.measure.spans import SpanRecorder, aligned_timelines
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.driver import Driver
from gradweave.runtime.plan_cache import PlanCache
from gradweave.runtime.plan_source import device_name
from gradweave.runtime.step_clock import StepClock
from gradweave.session.explain import explanation
from gradweave.session.findings import Findings, Stage
from gradweave.session.session import Session
from gradweave.timeline import Timeline


class Account:
    """What a wrapper has found, for whoever outlives it: it keeps nothing of torch's alive.

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

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        return explanation(self.findings(), workers=self._workers, baseline=self._baseline)

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self.findings().recipe(
            workers=self._workers, device=self._device, why_not=self.explain()
        )


class Planned:
    """A wrapper that plans itself: what it has found, and what it does."""

    process_group: dist.ProcessGroup
    _session: Session | None  # None: nothing is planned, for this reason
    _driver: Driver | None  # None: planning is over
    _why_unplanned: str | None
    _baseline: str  # what is sent without a plan, in words
    _device: torch.device
    _plan_cache: PlanCache | None  # None: nothing is kept for other runs
    _clock: StepClock | None  # None: this is a copy
    _recorder: SpanRecorder | None
    _clock_offset_s: float

    def account(self) -> Account:
        """Return what tells of this wrapper's findings, now and when the wrapper is gone."""
        return Account(
            self._session,
            self._driver,
            why_unplanned=self._why_unplanned,
            workers=self.process_group.size(),
            device=device_name(self._device),
            baseline=self._baseline,
        )

    @property
    def plan(self) -> Plan | None:
        """What is carried out; None while it is being found, and where nothing is planned.

        While densities warm up it is the best one for the present density.
        """
        return self.account().plan

    def findings(self) -> Findings:
        """What planning has found out so far."""
        return self.account().findings()

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        return self.account().explain()

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self.account().recipe()

    def timeline(self) -> Timeline:
        """The last step as this rank saw it."""
        return self._recorded().timeline()

    def timelines(self) -> list[Timeline]:
        """The last step on every rank, on one clock. Call it on every rank, between two steps.

        Where parameters are gathered, that is from the end of the step before, which is where
        forward begins then.
        """
        return aligned_timelines(self._recorded(), self.process_group, self._clock_offset_s)

    def _recorded(self) -> SpanRecorder:
        if self._recorder is None:
            raise RequestError("nothing was noted; wrap the model with timeline=True")
        return self._recorder

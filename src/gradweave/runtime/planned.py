"""What every wrapper tells about itself."""

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from gradweave.comm.small_messages import broadcast_text, group_device
from gradweave.errors import RequestError
from gradweave.measure.link_bursts import link_transfers
from gradweave.measure.spans import SpanRecorder, aligned_timelines
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.driver import Driver
from gradweave.runtime.phase_news import PhaseNews, gather_news, known_typical, news_of
from gradweave.runtime.plan_cache import PlanCache
from gradweave.runtime.plan_source import device_name
from gradweave.runtime.step_clock import KEPT_STEPS, StepClock
from gradweave.session.explain import explanation
from gradweave.session.findings import Findings, Stage
from gradweave.session.healing import Sent
from gradweave.session.link_times import link_times
from gradweave.session.session import Session
from gradweave.session.slow_ranks import (
    LEAST_STEPS,
    SlowRank,
    sentences,
    slow_network,
    slow_ranks,
)
from gradweave.timeline import Timeline


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
    _news: PhaseNews | None  # None: ranks cannot tell each other, or there is only one
    _slow_ranks: tuple[SlowRank, ...] = ()  # when all ranks were last asked
    _asked_at: int = -1  # at so many forward passes
    _recorder: SpanRecorder | None
    _clock_offset_s: float

    @property
    def plan(self) -> Plan | None:
        """What is carried out; None while it is being found, and where nothing is planned.

        While densities warm up it is the best one for the present density.
        """
        return self.findings().plan

    def findings(self) -> Findings:
        """What planning has found out so far, and who was slow when ``slow_ranks`` was called."""
        slow = self._slow_ranks
        if self._session is None:
            return Findings(stage=Stage.SETTLED, note=self._why_unplanned, slow_ranks=slow)
        found = self._session.findings
        if self._driver is not None:
            found = replace(found, steps=self._driver.steps)
        return replace(found, slow_ranks=slow) if slow else found

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains, and who is slow."""
        return explanation(
            self.findings(),
            workers=self.process_group.size(),
            baseline=self._baseline,
            who_is_slow=self._who_is_slow(),
        )

    def slow_ranks(self, *, steps: int = KEPT_STEPS) -> tuple[SlowRank, ...]:
        """Which ranks let all others wait, the worst first; none where that may be noise.

        Call it on every rank, between two steps. Ranks compare what their last ``steps`` steps took
        them, phase by phase, and send messages from host to host, for less than a second, to see
        whether one link is slow.
        """
        if not LEAST_STEPS <= steps <= KEPT_STEPS:
            raise RequestError(f"steps must be between {LEAST_STEPS} and {KEPT_STEPS}, got {steps}")
        if self._clock is None:
            raise RequestError("this is a copy, which does not look at its clock; ask the original")
        group = self.process_group
        if group.size() == 1:
            return ()
        everyone = gather_news(group, news_of(self._clock.phases()[-steps:]))
        ranks, hosts = known_typical(everyone), [news.host for news in everyone]
        links = link_times(link_transfers(group, hosts))
        found = slow_ranks(ranks, hosts=hosts, links=links, sent=self._sent())
        # Rank 0's, for all: clocks do not agree on what was read from them.
        text = broadcast_text(
            group, msgspec.json.encode(found).decode(), device=group_device(group)
        )
        self._asked_at = self._clock.begun
        self._slow_ranks = msgspec.json.decode(text, type=tuple[SlowRank, ...])
        return self._slow_ranks

    def _who_is_slow(self) -> list[str]:
        """By what ranks have told each other since all were asked, or by the answer to that."""
        news = self._news
        heard = news.heard() if news is not None and news.told_at > self._asked_at else None
        if heard is None:
            return sentences(self._slow_ranks)
        ranks, sent = known_typical(heard), self._sent()
        found = slow_ranks(ranks, hosts=[one.host for one in heard], sent=sent)
        hint = None if sent is None else slow_network(ranks, sent)
        return [*sentences(found), *([] if hint is None else [hint])]

    def _sent(self) -> Sent | None:
        """What a step sends, where all of that is known."""
        found = self.findings()
        if found.trace is None or found.plan is None or found.network is None:
            return None
        return Sent(
            trace=found.trace,
            plan=found.plan,
            network=found.network,
            workers=self.process_group.size(),
        )

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self.findings().recipe(
            workers=self.process_group.size(),
            device=device_name(self._device),
            why_not=self.explain(),
        )

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

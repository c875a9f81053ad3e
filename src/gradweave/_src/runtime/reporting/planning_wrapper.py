"""The base of both wrappers: what they tell about their planning and their steps."""

import logging

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from gradweave._src.clocks import clock_for
from gradweave._src.comm.small_messages import broadcast_text
from gradweave._src.errors import RequestError
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.link_bursts import link_transfers
from gradweave._src.measure.spans import SpanRecorder, aligned_timelines
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.driving.driver import Driver
from gradweave._src.runtime.reporting.account import PlanningAccount
from gradweave._src.runtime.reporting.all_ranks import require_all_ranks
from gradweave._src.runtime.reporting.captures import Captures
from gradweave._src.runtime.reporting.metrics import LiveNumbers, Metrics
from gradweave._src.runtime.reporting.phase_news import (
    PhaseNews,
    gather_news,
    known_typical,
    news_of,
)
from gradweave._src.runtime.reporting.saving import (
    Folder,
    gather_notes,
    rank_notes,
    script_name,
    tensors_of,
    write_on_rank_0,
)
from gradweave._src.runtime.reporting.step_clock import KEPT_STEPS, StepClock
from gradweave._src.runtime.wrapping.plan_cache import PlanCache
from gradweave._src.runtime.wrapping.plan_source import device_name
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings
from gradweave._src.session.link_times import link_times
from gradweave._src.session.saved_run import RankNotes, StepLosses, Training
from gradweave._src.session.session import Session
from gradweave._src.session.slow_ranks import (
    LEAST_TIMED_STEPS,
    SlowRank,
    sentences,
    slow_network,
    slow_ranks,
)
from gradweave._src.session.without_slowness import SentPerStep
from gradweave._src.timeline import Timeline

logger = logging.getLogger(__name__)

ONE_WORKER = "one worker sends no messages"  # a reason why nothing is planned


class PlanningWrapper:
    """The base of wrappers that plan by themselves; it tells what they found and what they do."""

    module: nn.Module
    process_group: dist.ProcessGroup
    _trained: dict[str, nn.Parameter]  # whose gradients travel, as they were declared
    _session: Session | None  # None where nothing is planned; ``_why_unplanned`` says why
    _driver: Driver | None  # None: planning is over
    _why_unplanned: str | None
    _baseline: str  # what is sent without a plan, in words
    _device: torch.device
    _plan_cache: PlanCache | None  # None: nothing is kept for other runs
    _clock: StepClock | None  # None: this is a copy
    _captures: Captures | None  # None: this is a copy
    _numbers: LiveNumbers | None  # None: this is a copy
    _news: PhaseNews | None  # None: ranks cannot tell each other, or there is only one
    _slow_ranks: tuple[SlowRank, ...] = ()  # when all ranks were last asked
    _asked_at: int = -1  # at so many forward passes
    _recorder: SpanRecorder | None
    _clock_offset_s: float

    def _begin_timing(self, device: torch.device, *, timeline: bool) -> StepClock:
        """Make what times steps, and messages where there is to be a timeline.

        All ranks call this together.
        """
        self._device = device
        self._clock = clock = StepClock(clock_for(device))
        self._captures = Captures(device, clock)
        self._recorder, self._clock_offset_s = None, 0.0
        if timeline:
            self._clock_offset_s = clock_offset_s(self.process_group)
            names = {parameter: name for name, parameter in self._trained.items()}
            self._recorder = SpanRecorder(names, clock=clock_for(device))
        self._numbers = LiveNumbers(clock, self._recorder)
        return clock

    def _is_captured(self, *, is_planning: bool) -> bool:
        """Return whether this pass or step becomes part of a graph."""
        return self._captures is not None and self._captures.has_begun(is_planning=is_planning)

    def account(self) -> PlanningAccount:
        """Return an object that answers the same questions when this wrapper is gone.

        It has ``plan``, ``findings()``, ``explain()`` and ``recipe()``, and keeps no model alive.
        """
        return PlanningAccount(
            self._session,
            self._driver,
            why_unplanned=self._why_unplanned,
            workers=self.process_group.size(),
            device=device_name(self._device),
            baseline=self._baseline,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in use. It is None while planning goes on, and where nothing is planned.

        While the density of compression warms up, it is the best plan for the present density.
        """
        return self.account().plan

    def findings(self) -> Findings:
        """Return what planning has found out, and who was slow when ``slow_ranks`` was called."""
        return replace(self.account().findings(), slow_ranks=self._slow_ranks)

    def explain(self) -> str:
        """Return a few sentences for people; it does not communicate.

        They say what was measured, which plans were tried, which was chosen, how much faster a step
        is, and which ranks are slow.
        """
        return explanation(
            self.account().findings(),
            workers=self.process_group.size(),
            baseline=self._baseline,
            who_is_slow=self._who_is_slow(),
        )

    def slow_ranks(self, *, steps: int = KEPT_STEPS) -> tuple[SlowRank, ...]:
        """Return the ranks that let all others wait, the worst first; none where that may be noise.

        Call it on every rank, between two steps. Ranks compare what their last ``steps`` steps took
        them, phase by phase, and send messages from host to host, for less than a second, to see
        whether one link is slow.

        Raises:
            RequestError: if ``steps`` is not between 20 and 64, a rank has timed fewer than 20, or
                the wrapper is a copy; on all ranks that call it, if others do not within 80 % of
                the process group's time-out.
            CollectiveError: if the store of the process group does not answer.
        """
        if not LEAST_TIMED_STEPS <= steps <= KEPT_STEPS:
            raise RequestError(
                f"steps must be between {LEAST_TIMED_STEPS} and {KEPT_STEPS}, got {steps}"
            )
        if self._clock is None:
            raise RequestError("this is a copy, which does not look at its clock; ask the original")
        group = self.process_group
        if group.size() == 1:
            return ()
        require_all_ranks(group, "slow_ranks")
        everyone = gather_news(group, news_of(self._clock.phases()[-steps:]))
        ranks, hosts = known_typical(everyone), [news.host for news in everyone]
        links = link_times(link_transfers(group, hosts))
        found = slow_ranks(ranks, hosts=hosts, links=links, sent=self._sent())
        # All ranks return what rank 0 found, because their clocks differ.
        text = broadcast_text(group, msgspec.json.encode(found).decode())
        self._asked_at = self._clock.begun
        self._slow_ranks = msgspec.json.decode(text, type=tuple[SlowRank, ...])
        return self._slow_ranks

    def _who_is_slow(self) -> list[str]:
        """Name slow ranks, by what ranks have told since ``slow_ranks`` or by its answer."""
        news = self._news
        heard = news.heard() if news is not None and news.told_at > self._asked_at else None
        if heard is None:
            return sentences(self._slow_ranks)
        ranks, sent = known_typical(heard), self._sent()
        found = slow_ranks(ranks, hosts=[one.host for one in heard], sent=sent)
        hint = None if sent is None else slow_network(ranks, sent)
        return [*sentences(found), *([] if hint is None else [hint])]

    def _sent(self) -> SentPerStep | None:
        """Return what a step sends; None where not all of that is known."""
        found = self.findings()
        if found.trace is None or found.plan is None or found.network is None:
            return None
        return SentPerStep(
            trace=found.trace,
            plan=found.plan,
            network=found.network,
            workers=self.process_group.size(),
        )

    def recipe(self) -> Recipe:
        """Return the plan with what it was made from, for ``plan=`` of a restart.

        It is the same on all ranks, so rank 0's is enough. `gradweave.write` makes a file of it.

        Raises:
            RequestError: if there is no recipe: planning goes on, or has chosen nothing.
        """
        return self.account().recipe()

    def timeline(self) -> Timeline:
        """Return the last step as this rank saw it; it is empty before the first one.

        Raises:
            RequestError: if the wrapper was made without ``timeline=True``.
        """
        return self._recorded().timeline()

    def timelines(self) -> list[Timeline]:
        """Return the last step on every rank, on one clock.

        Call it on every rank, between two steps. Where parameters are gathered, the step begins at
        the end of the one before, which is where forward begins then.

        Raises:
            RequestError: if the wrapper was made without ``timeline=True``; on all ranks that call
                it, if others do not within 80 % of the process group's time-out.
            CollectiveError: if the store of the process group does not answer.
        """
        recorded = self._recorded()
        require_all_ranks(self.process_group, "timelines")
        return aligned_timelines(recorded, self.process_group, self._clock_offset_s)

    def metrics(self) -> Metrics:
        """Return a few numbers of the last step as a flat dict, for whatever draws curves.

        It may be called in every step: it asks no other rank and waits for no device. Keys whose
        values are not known yet are missing.

        - "step": how many steps have ended since the model was wrapped.
        - "step_s": seconds of the last step, up to the end of its messages.
        - "exposed_s": seconds of it in which this rank waited for messages and computed nothing.
        - "overlap": the share of the messages' time that computing hides, from 0 to 1.
        - "messages": how many messages a step sends.
        - "stage": how far planning has come, such as "settled"; it is always there.
        - "predicted_s": predicted seconds of an iteration with the present plan.
        """
        found = self.findings()
        if self._numbers is None:
            return {"stage": str(found.stage)}
        return self._numbers.of(
            stage=str(found.stage), messages=self._messages(), predicted=found.predicted
        )

    def save_run(self, folder: Folder, *, losses: StepLosses | None = None) -> None:
        """Keep what is known of this training as the folder of a run, for `gradweave report`.

        Call it on every rank, between two steps. Rank 0 writes, and replaces a run that the folder
        held before. Measured timelines are kept if the model was wrapped with ``timeline=True``.

        Args:
            folder: where the run is kept.
            losses: rank 0's losses, if they are to be drawn: a number for each step since the model
                was wrapped, or pairs of step, counted from 0, and loss.

        Raises:
            RequestError: on all ranks, if no step has ended, losses do not fit the steps, the
                folder cannot be written or has files of others in the way, which gradients torch
                sends together is unknown, or the wrapper is a copy; on all ranks that call it, if
                others do not within 80 % of the process group's time-out.
            CollectiveError: if the store of the process group does not answer.
        """
        clock, group = self._clock, self.process_group
        if clock is None:
            raise RequestError("this is a copy, which notes nothing; save the wrapper that trains")
        require_all_ranks(group, "save_run")
        recorder = self._recorder
        notes_timelines = recorder is not None
        ranks = gather_notes(
            group, lambda: rank_notes(clock, notes_timelines=notes_timelines), RankNotes
        )
        notes_timelines = all(rank.notes_timelines for rank in ranks)
        timelines: list[Timeline] = []
        if recorder is not None and notes_timelines:
            timelines = aligned_timelines(recorder, group, self._clock_offset_s)

        def training() -> Training:
            if not clock.steps:
                ended = "was seen to end" if clock.begun else "has ended yet"
                raise RequestError(f"no step {ended}; save the run after some steps")
            found = self.findings()
            order = () if found.trace is None else tuple(t.name for t in found.trace.tensors)
            return Training(
                runtime=self._runtime,
                command=script_name(),
                findings=found,
                explanation=self.explain(),
                tensors=tensors_of(self._trained),
                model=type(self.module).__name__,
                plan=self._present_plan(order),
                step_s=tuple(clock.all_step_s()),
                stages=tuple(clock.stages),
                ranks=ranks,
                timelines=tuple(timelines),
            )

        write_on_rank_0(group, folder, losses, training)
        if not notes_timelines and group.rank() == 0:
            logger.warning(
                "%s has no measured timelines; they need the wrapper's timeline=True", folder
            )

    @property
    def _runtime(self) -> str:
        """The name that benchmarks have for a wrapper like this one."""
        raise NotImplementedError

    def _messages(self) -> int | None:
        """Return how many messages a step sends; None where that is not known yet."""
        raise NotImplementedError

    def _present_plan(self, order: tuple[str, ...]) -> Plan:
        """Return what is sent now, also without a plan; ``order`` is that of gradients, if known.

        Raise RequestError where nobody knows.
        """
        raise NotImplementedError

    def _recorded(self) -> SpanRecorder:
        if self._recorder is None:
            raise RequestError("nothing was noted; wrap the model with timeline=True")
        return self._recorder

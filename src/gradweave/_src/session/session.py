"""Finding the fastest plan for a model that has just been wrapped, while it trains.

A session decides, and does nothing itself: it yields commands, and whoever owns it carries them out
and replies. It knows no torch, no process group, no clock and no file, so that the whole course can
be tested in microseconds, with any step times, failures and stops. What it knows is in `knowledge`;
its longer parts are `prices` (what messages cost), `contest` (which plan is fastest) and `warm_up`
(while densities fall).
"""

import logging
from collections.abc import Generator
from itertools import count
from statistics import median
from typing import Any

from gradweave._src.network import Network
from gradweave._src.plan import Plan, merge
from gradweave._src.recipe import Recipe
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.commands import (
    Candidates,
    Command,
    Failed,
    FindCandidates,
    Install,
    Record,
    Recorded,
    Reply,
    SimpleBuckets,
    StepsTimed,
    TimeSteps,
    Told,
    Unplannable,
)
from gradweave._src.session.compression_worth import verdict
from gradweave._src.session.contest import baseline_visit, fastest
from gradweave._src.session.explain import planning_ended, waiting_for
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.knowledge import Knowledge
from gradweave._src.session.prices import learn_prices, price_compression
from gradweave._src.session.task import LAST_STEP, SETTLING_STEPS, PlanningTask
from gradweave._src.session.warm_up import warm_up
from gradweave._src.trace import Trace

logger = logging.getLogger(__name__)

# The median of so many steps is compared with what a step took when the plan was chosen.
DRIFT_STEPS = 20
# A remembered plan is watched for so many such windows, where nobody asked for more.
WINDOWS_WATCHED_BRIEFLY = 3

Course = Generator[Command, Any, None]


class Session:
    """Asks for one command at a time; ``findings`` are what it knows by now.

    All ranks' sessions come to the same, so only one of them speaks in the log. Three calls end
    planning early: ``stop`` where all ranks end at the same step and can still change buckets,
    ``abandon`` where other ranks cannot be told of a change, so what was sent last stays, and
    ``drop_plan`` where a caller has taken the plan away and sends what the wrapper began with.
    """

    def __init__(
        self,
        task: PlanningTask,
        *,
        given: Plan | Recipe | None = None,
        is_remembered: bool = False,
        speaks: bool = True,
    ) -> None:
        self.task = task
        self._known = Knowledge(task)
        self._speaks = speaks
        if given is not None:
            self._accept(given, is_remembered=is_remembered)
        self._course: Course | None = self._whole_course()

    @property
    def findings(self) -> Findings:
        return self._known.findings

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for."""
        return self._course is None

    def begin(self) -> Command | None:
        """Return the first command; None where there is nothing to do."""
        return self._resume(None)

    def reply(self, told: Told | Reply | None) -> Command | None:
        """Take the reply to the last command, None after an Install, and return the next one."""
        reply = told
        if isinstance(told, Told):
            reply = told.reply
            self._known.note(steps=told.steps, elapsed_s=told.elapsed_s)
        assert not isinstance(reply, Told)
        if isinstance(reply, Failed):
            return self.stop(reply.why)
        return self._resume(reply)

    def adopt(self, recipe: Recipe, task: PlanningTask) -> None:
        """Begin with what an earlier run has chosen; call it before ``begin``."""
        self.task, self._known = task, Knowledge(task)
        self._accept(recipe, is_remembered=True)

    def stop(self, why: str) -> Command | None:
        """Keep a plan that is settled; otherwise go back to what the wrapper began with.

        From now on nothing is measured and nothing changes. The command, if there is one, is the
        last, and has no reply.
        """
        if self.is_over:
            return None
        self._close_course()
        found = self.findings
        if found.plan is not None and found.stage is Stage.SETTLED:
            self._say(logging.WARNING, f"no more planning again: {why}")
            return None
        if found.is_whole:
            self._known.note(stage=Stage.SETTLED, note=why)
            return None
        has_begun = found.stage is not Stage.NOT_BEGUN
        command = self._give_up(why)
        return command if has_begun else None

    def abandon(self, why: str) -> None:
        """End planning with what was sent last: other ranks cannot be told of anything else."""
        self._close_course()
        self._known.note(stage=Stage.SETTLED, note=why)

    def drop_plan(self, why: str) -> None:
        """Note that what the wrapper began with is sent again, and that planning is over."""
        self._close_course()
        self._known.note(
            stage=Stage.SETTLED,
            plan=None,
            is_given=False,
            is_remembered=False,
            predicted=None,
            step_s=None,
            worth=None,
            waits_for=None,
            note=why,
        )
        self._say(logging.WARNING, f"keeping {self.task.baseline}: {why}")

    def _close_course(self) -> None:
        if self._course is not None:
            self._course.close()
            self._course = None

    def _resume(self, reply: Reply | None) -> Command | None:
        if self._course is None:
            return None
        try:
            command = self._course.send(reply)
        except StopIteration:
            self._course = None
            return None
        except Exception as error:  # noqa: BLE001 all ranks come here alike, and training goes on
            return self.stop(f"planning failed: {error}")
        if self.findings.stage is not Stage.SETTLED:
            self._known.note(waits_for=waiting_for(command))
        return command

    def _give_up(self, why: str, order: tuple[str, ...] = ()) -> Install:
        if self.findings.trace is not None:
            order = tuple(tensor.name for tensor in self.findings.trace.tensors)
        self._known.note(stage=Stage.SETTLED, plan=None, note=why)
        self._say(logging.WARNING, f"keeping {self.task.baseline}: {why}")
        return Install(SimpleBuckets.ORIGINAL, order=order)

    def _say(self, level: int, text: str) -> None:
        if self._speaks:
            logger.log(level, "%s", text)

    def _accept(self, given: Plan | Recipe, *, is_remembered: bool) -> None:
        """Carry out a plan of the user's, or of an earlier run, as it is."""
        known = self._known
        plan = given if isinstance(given, Plan) else given.plan
        known.note(
            stage=Stage.SETTLED,
            plan=plan,
            is_given=not is_remembered,
            is_remembered=is_remembered,
        )
        if isinstance(given, Recipe):
            known.note(trace=given.trace, network=given.network, step_s=given.step_s)
            known.note(predicted=known.predicted(plan))
            self._judge(plan, given.trace, given.network)
        how = "remembered from an earlier run" if is_remembered else "as given"
        self._say(logging.INFO, f"{len(plan.buckets)} messages {how}, planned by {plan.planner}")

    def _whole_course(self) -> Course:
        if self.task.is_whole_model:
            yield from self._judge_whole_model()
            return
        if self.findings.plan is None and not (yield from self._plan()):
            return
        while (most := self.task.replan_when) is not None:
            is_drifting = yield from self._watch(most)
            if not is_drifting or not (yield from self._plan()) or self.task.watches_briefly:
                return

    def _plan(self) -> Generator[Command, Any, bool]:
        """Record, learn, plan, try and choose; return whether there is a plan in the end."""
        known, task = self._known, self.task
        known.begin_planning()
        began = known.findings
        known.note(stage=Stage.RECORDING)
        self._say(logging.INFO, f"planning begins; it takes {task.most_steps} steps at most")
        recorded: Recorded | Unplannable = yield Record(task.record_steps)
        if isinstance(recorded, Unplannable):
            yield self._give_up(recorded.why, recorded.order)
            return False
        known.note(stage=Stage.LEARNING, trace=recorded.trace, passes=recorded.passes)
        if task.compression_at is None:
            compression = None
            visit = yield from baseline_visit(known)
            network = yield from learn_prices(known)
        else:
            compression = task.compression_at(LAST_STEP)
            network = yield from learn_prices(known)
            network = yield from warm_up(known, network, task.compression_at)
            known.note(stage=Stage.TRYING, network=network, plan=None, predicted=None)
            visit = yield from baseline_visit(known)
            known.allow(task.most_steps)  # a warm-up takes as long as the user says
        known.note(stage=Stage.TRYING, network=network, baseline_step_s=visit.step_s)
        found: Candidates = yield FindCandidates(recorded.trace, network, compression)
        best = found.candidates[0]
        if task.trial_steps:
            trial = yield from fastest(known, found.candidates, visit, compression)
            best = trial.candidate
        yield from self._settle(best, began)
        return True

    def _settle(self, best: Candidate, began: Findings) -> Course:
        """Install the chosen plan; planning ``began`` with those findings."""
        known = self._known
        yield Install(best.plan)
        known.note(
            stage=Stage.SETTLED,
            plan=best.plan,
            predicted=known.predicted(best.plan),
            planning_steps=known.findings.steps - began.steps,
            planning_s=known.findings.elapsed_s - began.elapsed_s,
            waits_for=None,
        )
        self._say(logging.INFO, planning_ended(self.findings, baseline=self.task.baseline))
        network = known.findings.network
        assert network is not None
        self._judge(best.plan, known.trace, network)

    def _judge_whole_model(self) -> Course:
        """Find out whether one sparse message of the whole model pays; it is sent in any case."""
        known = self._known
        assert self.task.compression_at is not None
        compression = self.task.compression_at(LAST_STEP)
        known.note(stage=Stage.RECORDING)
        self._say(logging.INFO, f"finding out whether {compression} pays for the whole model")
        recorded: Recorded | Unplannable = yield Record(self.task.record_steps)
        if isinstance(recorded, Unplannable):
            known.note(stage=Stage.SETTLED, note=recorded.why)
            return
        trace = recorded.trace
        known.note(trace=trace, passes=recorded.passes)
        network = yield from learn_prices(known)
        priced = yield from price_compression(known, network, compression)
        plan = merge(
            trace,
            [len(trace.tensors)],
            planner="whole model",
            collective="native",
            compression=compression,
        )
        known.note(stage=Stage.SETTLED, network=priced, waits_for=None)
        self._judge(plan, trace, priced)

    def _judge(self, plan: Plan, trace: Trace, network: Network) -> None:
        worth = verdict(trace, plan, network, workers=self.task.workers)
        self._known.note(worth=worth)
        if worth is not None:
            self._say(logging.INFO if worth.pays else logging.WARNING, str(worth))

    def _watch(self, most: float) -> Generator[Command, Any, bool]:
        """Return whether steps are slower or faster by this share than when the plan was chosen.

        They are not compared with the prediction, which knows nothing of loading data and the like.
        Where it is unknown what they took then, the first steps tell. With a remembered plan they
        may be faster than in the run that chose it; what is expected is the faster time from then
        on.
        """
        settling_steps = SETTLING_STEPS
        windows = range(WINDOWS_WATCHED_BRIEFLY) if self.task.watches_briefly else count()
        for _ in windows:
            timed: StepsTimed = yield TimeSteps(DRIFT_STEPS, settling_steps)
            settling_steps = 0
            now_s = median(timed.steps_s)
            before_s = self.findings.step_s or now_s
            if self.findings.is_remembered:
                before_s = min(before_s, now_s)
            self._known.note(step_s=before_s)
            if abs(now_s - before_s) > most * before_s:
                self._say(
                    logging.WARNING,
                    f"steps were expected to take {before_s * 1e3:.1f} ms and take "
                    f"{now_s * 1e3:.1f} ms; planning again",
                )
                return True
        return False

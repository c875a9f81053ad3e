"""From a model that has just been wrapped to the fastest plan for it, while it trains.

A session decides, and does nothing itself: it yields commands, and whoever owns it carries them out
and replies. It knows no torch, no process group, no clock and no file, so that the whole course
can be tested in microseconds, with any step times, failures and stops.
"""

import logging
from collections.abc import Callable, Generator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.network import Network
from gradweave.plan import Plan, merge
from gradweave.planning.baselines import TORCH_BYTES, TORCH_FIRST_BYTES
from gradweave.recipe import Recipe
from gradweave.session.candidates import Candidate
from gradweave.session.commands import (
    Candidates,
    Command,
    CompressionPrice,
    Failed,
    FindCandidates,
    Install,
    Measured,
    PriceCompression,
    Record,
    Reply,
    SimpleBuckets,
    SlowestRank,
    StepsTaken,
    TakeSteps,
    TimeSteps,
    Unplannable,
)
from gradweave.session.compression import verdict, with_compression_price
from gradweave.session.findings import Findings, Stage
from gradweave.session.trials import Trial, finalists, winner
from gradweave.simulation import simulate
from gradweave.timeline import Timeline
from gradweave.trace import Trace
from gradweave.vocabulary import Passes

logger = logging.getLogger(__name__)

# The first steps after a change allocate.
SETTLING_STEPS = 2
DRIFT_STEPS = 20
# Beyond every warm-up.
LAST_STEP = 1 << 60

Course = Generator[Command, Any, None]


class PlanningTask(Struct, frozen=True, kw_only=True):
    """What a session is to find a plan for; the same on every rank."""

    workers: int
    planner: str = "optimal"
    passes: Passes = "backward"
    record_steps: int = 5
    trial_steps: int = 5  # 0: the prediction is trusted
    replan_when: float | None = None
    baseline: str = "torch's own buckets"  # what every plan is compared with, in words
    baseline_caps_bytes: tuple[int, int] = (TORCH_FIRST_BYTES, TORCH_BYTES)  # the first's, others'
    keeps_declared_order: bool = False  # of gradients, turned round
    compression_at: Callable[[int], Compression] | None = None  # by training step
    is_whole_model: bool = False  # which travels as one sparse message, whatever that costs


class Session:
    """Asks for one command at a time; ``findings`` are what it knows by now."""

    def __init__(
        self,
        task: PlanningTask,
        *,
        given: Plan | Recipe | None = None,
        is_remembered: bool = False,
    ) -> None:
        self.task = task
        self.findings = Findings(is_whole=task.is_whole_model)
        if given is not None:
            self._accept(given, is_remembered=is_remembered)
        self._course: Course | None = self._whole_course()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for."""
        return self._course is None

    def begin(self) -> Command | None:
        """Return the first command; None where there is nothing to do."""
        return self._resume(None)

    def reply(self, reply: Reply | None) -> Command | None:
        """Take what came of the last command (None of an Install), and return the next one."""
        if isinstance(reply, Failed):
            return self.stop(reply.why)
        return self._resume(reply)

    def stop(self, why: str) -> Command | None:
        """Keep a plan that is settled; otherwise leave what the wrapper began with.

        From now on nothing is measured and nothing changes. The command, if there is one, is the
        last, and has no reply.
        """
        if self.is_over:
            return None
        if self.findings.stage is Stage.SETTLED:
            logger.warning("no more planning again: %s", why)
        return self._end(why)

    def abandon(self, why: str) -> None:
        """Whatever was sent last goes on: other ranks cannot be told of anything else."""
        if self._course is not None:
            self._course.close()
            self._course = None
        self.findings = replace(self.findings, stage=Stage.SETTLED, note=why)

    def _resume(self, reply: Reply | None) -> Command | None:
        if self._course is None:
            return None
        try:
            return self._course.send(reply)
        except StopIteration:
            self._course = None
            return None
        except Exception as error:  # noqa: BLE001 all ranks come here alike, and training goes on
            return self._end(f"planning failed: {error}")

    def _end(self, why: str) -> Command | None:
        if self._course is not None:
            self._course.close()
            self._course = None
        found = self.findings
        if found.plan is not None:
            self.findings = replace(found, stage=Stage.SETTLED)
            return None
        if found.is_whole:
            self.findings = replace(found, stage=Stage.SETTLED, note=why)
            return None
        has_installed = found.stage is not Stage.NOT_BEGUN
        command = self._give_up(why)
        return command if has_installed else None

    def _give_up(self, why: str, order: tuple[str, ...] = ()) -> Install:
        if self.findings.trace is not None:
            order = tuple(tensor.name for tensor in self.findings.trace.tensors)
        self.findings = replace(self.findings, stage=Stage.SETTLED, plan=None, note=why)
        logger.warning("keeping %s: %s", self.task.baseline, why)
        return Install(SimpleBuckets.ORIGINAL, order=order)

    def _accept(self, given: Plan | Recipe, *, is_remembered: bool) -> None:
        """A plan of the user's, or of an earlier run, is carried out as it is."""
        plan = given if isinstance(given, Plan) else given.plan
        self.findings = replace(
            self.findings,
            stage=Stage.SETTLED,
            plan=plan,
            is_given=not is_remembered,
            is_remembered=is_remembered,
        )
        if isinstance(given, Recipe):
            self.findings = replace(
                self.findings,
                trace=given.trace,
                network=given.network,
                predicted=self._predicted(plan, given.trace, given.network),
                step_s=given.step_s,
            )
            self._judge(plan, given.trace, given.network)
        how = "remembered from an earlier run" if is_remembered else "as given"
        logger.info("%d messages %s, planned by %s", len(plan.buckets), how, plan.planner)

    def _whole_course(self) -> Course:
        if self.task.is_whole_model:
            yield from self._judge_whole_model()
            return
        if self.findings.plan is None and not (yield from self._plan()):
            return
        while self.task.replan_when is not None:
            yield from self._until_drift(self.task.replan_when)
            if not (yield from self._plan()):
                return

    def _plan(self) -> Generator[Command, Any, bool]:
        """Record and calibrate, plan, try, choose; whether there is a plan in the end."""
        self.findings = Findings(stage=Stage.RECORDING)
        yield Install(SimpleBuckets.ONE)
        measured: Measured | Unplannable = yield Record(self.task.record_steps)
        if isinstance(measured, Unplannable):
            yield self._give_up(measured.why, measured.order)
            return False
        trace, network = measured.trace, measured.network
        compression = None
        if self.task.compression_at is not None:
            compression = self.task.compression_at(LAST_STEP)
            network = yield from self._warm_up(trace, network, self.task.compression_at)
        self.findings = Findings(stage=Stage.TRYING, trace=trace, network=network)
        found: Candidates = yield FindCandidates(trace, network, compression)
        best = found.candidates[0]
        if self.task.trial_steps:
            best = yield from self._fastest(found.candidates)
        yield from self._settle(best, trace, network)
        return True

    def _warm_up(
        self, trace: Trace, network: Network, compression_at: Callable[[int], Compression]
    ) -> Generator[Command, Any, Network]:
        """Until the last density has come, by the best plan for each; then the prices for that.

        What is tried before would be chosen for messages that are many times as large.
        """
        taken: StepsTaken = yield TakeSteps(0)
        while True:
            now = compression_at(taken.next_step)
            priced = yield from self._priced(network, now)
            if now == compression_at(LAST_STEP):
                return priced
            found: Candidates = yield FindCandidates(trace, priced, now)
            best = found.candidates[0]
            yield Install(best.plan)
            self.findings = Findings(
                stage=Stage.WARMING_UP,
                trace=trace,
                network=priced,
                plan=best.plan,
                predicted=self._predicted(best.plan, trace, priced),
            )
            while compression_at(taken.next_step) == now:
                taken = yield TakeSteps(1)

    def _priced(
        self, network: Network, compression: Compression
    ) -> Generator[Command, Any, Network]:
        price: CompressionPrice = yield PriceCompression(compression)
        return with_compression_price(
            network,
            compression,
            selection_s_per_element=price.selection_s_per_element,
            exchange=price.exchange,
            workers=self.task.workers,
        )

    def _judge_whole_model(self) -> Course:
        """Whether it pays to send the whole model as one sparse message; it is done in any case."""
        assert self.task.compression_at is not None
        compression = self.task.compression_at(LAST_STEP)
        self.findings = replace(self.findings, stage=Stage.RECORDING)
        measured: Measured | Unplannable = yield Record(self.task.record_steps)
        if isinstance(measured, Unplannable):
            self.findings = replace(self.findings, stage=Stage.SETTLED, note=measured.why)
            return
        trace = measured.trace
        priced = yield from self._priced(measured.network, compression)
        plan = merge(
            trace,
            [len(trace.tensors)],
            planner="whole model",
            collective="native",
            compression=compression,
        )
        self.findings = replace(self.findings, stage=Stage.SETTLED, trace=trace, network=priced)
        self._judge(plan, trace, priced)

    def _fastest(self, candidates: tuple[Candidate, ...]) -> Generator[Command, Any, Candidate]:
        for candidate in candidates:
            step_s = yield from self._tried(candidate)
            self._note(Trial(candidate=candidate, rounds_s=(step_s,)))
        for candidate in finalists(self.findings.trials):
            step_s = yield from self._tried(candidate)
            before = self.findings.trials[candidates.index(candidate)]
            self._note(replace(before, rounds_s=(*before.rounds_s, step_s)))
        best = winner(self.findings.trials)
        self.findings = replace(self.findings, step_s=best.step_s)
        return best.candidate

    def _tried(self, candidate: Candidate) -> Generator[Command, Any, float]:
        yield Install(candidate.plan)
        slowest: SlowestRank = yield TimeSteps(self.task.trial_steps, SETTLING_STEPS)
        return slowest.step_s

    def _note(self, trial: Trial) -> None:
        """In the place of what was known of the candidate."""
        trials = {one.candidate: one for one in self.findings.trials}
        trials[trial.candidate] = trial
        self.findings = replace(self.findings, trials=tuple(trials.values()))

    def _settle(self, best: Candidate, trace: Trace, network: Network) -> Course:
        yield Install(best.plan)
        self.findings = replace(
            self.findings,
            stage=Stage.SETTLED,
            plan=best.plan,
            predicted=self._predicted(best.plan, trace, network),
        )
        logger.info(
            "%d tensors in %d messages, planned by %s, predicted %.1f ms an iteration",
            len(trace.tensors),
            len(best.plan.buckets),
            best.plan.planner,
            best.predicted_s * 1e3,
        )
        self._judge(best.plan, trace, network)

    def _judge(self, plan: Plan, trace: Trace, network: Network) -> None:
        worth = verdict(trace, plan, network, workers=self.task.workers)
        self.findings = replace(self.findings, worth=worth)
        if worth is not None and not worth.pays:
            logger.warning("%s", worth)

    def _predicted(self, plan: Plan, trace: Trace, network: Network) -> Timeline:
        return simulate(trace, plan, network, workers=self.task.workers)

    def _until_drift(self, most: float) -> Course:
        """Until steps take another time than when the plan was chosen, by this share.

        Not than predicted: a prediction knows nothing of loading data and the like. Where it is
        unknown what they took, the first steps tell.
        """
        settling_steps = SETTLING_STEPS
        while True:
            now: SlowestRank = yield TimeSteps(DRIFT_STEPS, settling_steps)
            settling_steps = 0
            expected_s = self.findings.step_s or now.step_s
            self.findings = replace(self.findings, step_s=expected_s)
            if abs(now.step_s - expected_s) > most * expected_s:
                logger.warning(
                    "steps were expected to take %.1f ms and take %.1f ms; planning again",
                    expected_s * 1e3,
                    now.step_s * 1e3,
                )
                return

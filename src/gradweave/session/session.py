"""From a model that has just been wrapped to the fastest plan for it, while it trains.

A session decides, and does nothing itself: it yields commands, and whoever owns it carries them out
and replies. It knows no torch, no process group, no clock and no file, so that the whole course
can be tested in microseconds, with any step times, failures and stops.
"""

import logging
from collections.abc import Callable, Generator
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.costs import Cost
from gradweave.errors import RequestError
from gradweave.network import Network
from gradweave.plan import Plan, merge
from gradweave.planning import OPERATIONS
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
    PriceCompression,
    Probe,
    Probed,
    Record,
    Recorded,
    Reply,
    SimpleBuckets,
    StepsTaken,
    StepsTimed,
    TakeSteps,
    TimeSteps,
    Told,
    Unplannable,
)
from gradweave.session.compression import verdict, with_compression_price
from gradweave.session.explain import planning_ended, waiting_for
from gradweave.session.findings import Findings, Stage
from gradweave.session.gains import expected_s, is_worth_trying, why_nothing_is_gained
from gradweave.session.learning import (
    MessageSample,
    learnt_network,
    probe_takes_s,
    sizes_to_probe,
)
from gradweave.session.trials import CLEARLY_WORSE, Outcome, Trial, outcome
from gradweave.simulation import simulate
from gradweave.timeline import Timeline
from gradweave.trace import Trace
from gradweave.vocabulary import Passes, Way

logger = logging.getLogger(__name__)

# The first step after a change allocates.
SETTLING_STEPS = 1
DRIFT_STEPS = 20
# Of a chosen plan, before it is called settled.
CONFIRMING_STEPS = 6
# Messages beside training may lengthen it by this share of the time since its first step, and by no
# more than so many seconds.
PROBED_SHARE, MOST_PROBED_S = 0.02, 2.0
# A start-up so dear beside backward makes other collectives than the first worth a look.
DEAR_STARTUP = 0.05
# How many plans may be tried against what is sent, and when planning ends with the best so far.
MOST_CHALLENGERS = 3
MOST_STEPS = 100
# Beyond every warm-up.
LAST_STEP = 1 << 60

Course = Generator[Command, Any, None]


class PlanningTask(Struct, frozen=True, kw_only=True):
    """What a session is to find a plan for; the same on every rank."""

    workers: int
    planner: str = "optimal"
    passes: Passes = "backward"
    collective: str = "native"  # by which messages travel without a plan
    rivals: tuple[str, ...] = ()  # other collectives that plans may use
    record_steps: int = 5
    trial_steps: int = 4  # 0: the prediction is trusted
    replan_when: float | None = None
    baseline: str = "torch's own buckets"  # what every plan is compared with, in words
    baseline_caps_bytes: tuple[int, int] = (TORCH_FIRST_BYTES, TORCH_BYTES)  # the first's, others'
    keeps_declared_order: bool = False  # of gradients, turned round
    compression_at: Callable[[int], Compression] | None = None  # by training step
    is_whole_model: bool = False  # which travels as one sparse message, whatever that costs


class Session:
    """Asks for one command at a time; ``findings`` are what it knows by now.

    Of all ranks' sessions, which come to the same, one speaks in the log.
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
        self.findings = Findings(is_whole=task.is_whole_model)
        self._speaks = speaks
        self._samples: list[MessageSample] = []
        self._began_at, self._began_s, self._last_step = 0, 0.0, MOST_STEPS
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

    def reply(self, told: Told | Reply | None) -> Command | None:
        """Take what came of the last command (None of an Install), and return the next one."""
        reply = told
        if isinstance(told, Told):
            reply = told.reply
            self.findings = replace(self.findings, steps=told.steps, elapsed_s=told.elapsed_s)
        assert not isinstance(reply, Told)
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
            self._say(logging.WARNING, f"no more planning again: {why}")
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
            command = self._course.send(reply)
        except StopIteration:
            self._course = None
            return None
        except Exception as error:  # noqa: BLE001 all ranks come here alike, and training goes on
            return self._end(f"planning failed: {error}")
        if self.findings.stage is not Stage.SETTLED:
            self.findings = replace(self.findings, waits_for=waiting_for(command))
        return command

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
        has_begun = found.stage is not Stage.NOT_BEGUN
        command = self._give_up(why)
        return command if has_begun else None

    def _give_up(self, why: str, order: tuple[str, ...] = ()) -> Install:
        if self.findings.trace is not None:
            order = tuple(tensor.name for tensor in self.findings.trace.tensors)
        self.findings = replace(self.findings, stage=Stage.SETTLED, plan=None, note=why)
        self._say(logging.WARNING, f"keeping {self.task.baseline}: {why}")
        return Install(SimpleBuckets.ORIGINAL, order=order)

    def _say(self, level: int, text: str) -> None:
        if self._speaks:
            logger.log(level, "%s", text)

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
            self.findings = replace(self.findings, trace=given.trace, network=given.network)
            self.findings = replace(
                self.findings, predicted=self._predicted(plan), step_s=given.step_s
            )
            self._judge(plan, given.trace, given.network)
        how = "remembered from an earlier run" if is_remembered else "as given"
        self._say(logging.INFO, f"{len(plan.buckets)} messages {how}, planned by {plan.planner}")

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
        """Record, learn, plan, try, choose; whether there is a plan in the end."""
        before = self.findings
        self._began_at, self._began_s = before.steps, before.elapsed_s
        self._last_step = before.steps + MOST_STEPS
        self._samples = []
        self.findings = Findings(
            stage=Stage.RECORDING,
            steps=before.steps,
            elapsed_s=before.elapsed_s,
            most_steps=self._last_step,
        )
        self._say(logging.INFO, f"planning begins; it takes {MOST_STEPS} steps at most")
        recorded: Recorded | Unplannable = yield Record(self.task.record_steps)
        if isinstance(recorded, Unplannable):
            yield self._give_up(recorded.why, recorded.order)
            return False
        trace = recorded.trace
        self.findings = replace(self.findings, stage=Stage.LEARNING, trace=trace)
        if self.task.compression_at is None:
            baseline_s = yield from self._baseline(trace)
            network = yield from self._learnt(trace)
            compression = None
        else:
            network = yield from self._learnt(trace)
            compression = self.task.compression_at(LAST_STEP)
            network = yield from self._warm_up(trace, network, self.task.compression_at)
            self.findings = replace(
                self.findings, stage=Stage.TRYING, network=network, plan=None, predicted=None
            )
            baseline_s = yield from self._baseline(trace)
        self.findings = replace(
            self.findings, stage=Stage.TRYING, network=network, baseline_step_s=median(baseline_s)
        )
        found: Candidates = yield FindCandidates(trace, network, compression)
        if self.task.trial_steps:
            best = yield from self._best(found.candidates, baseline_s, compression)
            self.findings = replace(self.findings, step_s=best.step_s)
            yield from self._settle(best.candidate)
        else:
            yield from self._settle(found.candidates[0])
        return True

    def _baseline(self, trace: Trace) -> Generator[Command, Any, tuple[float, ...]]:
        """What steps take with what the wrapper began with, and what its messages tell."""
        order = tuple(tensor.name for tensor in trace.tensors)
        yield Install(SimpleBuckets.ORIGINAL, order=order, notes_messages=True)
        return (yield from self._timed(None))

    def _timed(self, hopeless_s: float | None) -> Generator[Command, Any, tuple[float, ...]]:
        steps = max(1, self.task.trial_steps)
        timed: StepsTimed = yield TimeSteps(steps, SETTLING_STEPS, hopeless_s)
        self._samples += timed.samples
        return timed.steps_s

    def _learnt(self, trace: Trace) -> Generator[Command, Any, Network]:
        """What messages cost, as training's own tell, and a few beside it where they do not."""
        is_sparse = self.task.compression_at is not None
        sizes = sizes_to_probe(self._samples, is_sparse=is_sparse)
        if is_sparse or self._may_probe(trace, sizes, ways=1):
            yield from self._probed((self.task.collective,), sizes)
        startup_s = float(self._cost(trace).seconds(np.zeros(1))[0])
        is_dear = startup_s > DEAR_STARTUP * trace.backward_s
        if is_dear and self._may_probe(trace, sizes, ways=len(self.task.rivals)):
            yield from self._probed(self.task.rivals, sizes)
        return self._network(trace)

    def _may_probe(self, trace: Trace, sizes: tuple[int, ...], *, ways: int) -> bool:
        """Whether that would not lengthen training by too much."""
        return ways * probe_takes_s(self._cost(trace), sizes) <= self._allowed_s

    @property
    def _allowed_s(self) -> float:
        return min(MOST_PROBED_S, PROBED_SHARE * self.findings.elapsed_s)

    def _probed(self, collectives: tuple[str, ...], sizes: tuple[int, ...]) -> Course:
        operations = OPERATIONS[self.task.passes]
        ways = tuple(Way(operation, by) for by in collectives for operation in operations)
        if ways and sizes:
            probed: Probed = yield Probe(ways, sizes, self._allowed_s)
            self._samples += probed.samples

    def _cost(self, trace: Trace) -> Cost:
        """Of messages without a plan."""
        operation, *_ = OPERATIONS[self.task.passes]
        return self._network(trace).cost(operation, self.task.collective, workers=self.task.workers)

    def _network(self, trace: Trace) -> Network:
        network = learnt_network(
            self._samples, workers=self.task.workers, model_bytes=int(trace.nbytes.sum())
        )
        if network is None:
            raise RequestError("no message of the training was seen")
        return network

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
            self.findings = replace(self.findings, stage=Stage.WARMING_UP, network=priced)
            self.findings = replace(
                self.findings, plan=best.plan, predicted=self._predicted(best.plan)
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
        recorded: Recorded | Unplannable = yield Record(self.task.record_steps)
        if isinstance(recorded, Unplannable):
            self.findings = replace(self.findings, stage=Stage.SETTLED, note=recorded.why)
            return
        trace = recorded.trace
        network = yield from self._learnt(trace)
        priced = yield from self._priced(network, compression)
        plan = merge(
            trace,
            [len(trace.tensors)],
            planner="whole model",
            collective="native",
            compression=compression,
        )
        self.findings = replace(self.findings, stage=Stage.SETTLED, trace=trace, network=priced)
        self._judge(plan, trace, priced)

    def _best(
        self,
        candidates: tuple[Candidate, ...],
        baseline_s: tuple[float, ...],
        compression: Compression | None,
    ) -> Generator[Command, Any, Trial]:
        """Who stays when the most promising have challenged what is sent, one by one.

        What a challenger's messages tell is learnt before the next one is chosen.
        """
        trace = self.findings.trace
        assert trace is not None
        baseline = champion = self._note(Trial(candidate=candidates[-1], visits_s=(baseline_s,)))
        for _ in range(MOST_CHALLENGERS):
            challenger = self._challenger(candidates, champion)
            if challenger is None or self.findings.steps >= self._last_step:
                break
            untried = Trial(candidate=challenger, visits_s=())
            champion = yield from self._challenged(champion, untried)
            if compression is None:
                self.findings = replace(self.findings, network=self._network(trace))
            assert self.findings.network is not None
            found: Candidates = yield FindCandidates(trace, self.findings.network, compression)
            candidates = found.candidates
        baseline = self._trial_of(baseline.candidate)
        if not champion.candidate.is_baseline:
            champion = yield from self._confirmed(champion, baseline)
        if champion.candidate.is_baseline:
            self.findings = replace(self.findings, note=self._why_nothing(candidates, champion))
        return champion

    def _confirmed(self, chosen: Trial, baseline: Trial) -> Generator[Command, Any, Trial]:
        """The chosen plan as it will run; where its steps are no gain after all, both run again."""
        yield Install(chosen.candidate.plan)
        timed: StepsTimed = yield TimeSteps(CONFIRMING_STEPS, SETTLING_STEPS)
        chosen = self._note(replace(chosen, visits_s=(*chosen.visits_s, timed.steps_s)))
        if max(chosen.step_s, chosen.rounds_s[-1]) > baseline.step_s:
            baseline = yield from self._visited(baseline, None)
            chosen = yield from self._challenged(baseline, chosen)
        # By all visits: steps vary, and what is promised is what was measured.
        baseline = self._trial_of(baseline.candidate)
        return chosen if chosen.step_s <= baseline.step_s else baseline

    def _challenger(self, candidates: tuple[Candidate, ...], champion: Trial) -> Candidate | None:
        """The most promising that was not tried, and could win by enough to matter."""
        tried = {trial.candidate.plan.buckets for trial in self.findings.trials}
        untried = [one for one in candidates if one.plan.buckets not in tried]
        is_asked_for = self.task.planner != "optimal" and len(tried) == 1
        if is_asked_for and candidates[0] in untried:
            return candidates[0]
        predicted_s = self._predicted(champion.candidate.plan).iteration_s
        best = min(untried, key=lambda one: one.predicted_s, default=None)
        if best is None or not is_worth_trying(
            expected_s(best.predicted_s, champion.step_s, predicted_s), champion.step_s
        ):
            return None
        return best

    def _challenged(self, champion: Trial, challenger: Trial) -> Generator[Command, Any, Trial]:
        """Both run in turn until one of them has clearly won, which stays."""
        # The champion has just run; what both took before that is of another time.
        first, firsts = len(challenger.visits_s), len(champion.visits_s) - 1
        hopeless_s = (1 + CLEARLY_WORSE) * champion.rounds_s[-1]
        while True:
            challenger = yield from self._visited(challenger, hopeless_s)
            if min(challenger.visits_s[-1]) > hopeless_s:
                result = Outcome.NOT_FASTER
            else:
                result = outcome(challenger.rounds_s[first:], champion.rounds_s[firsts:])
            if result is not Outcome.CLOSE:
                break
            champion = yield from self._visited(champion, None)
        if result is Outcome.FASTER:
            return challenger
        yield Install(champion.candidate.plan, notes_messages=True)
        return champion

    def _visited(self, trial: Trial, hopeless_s: float | None) -> Generator[Command, Any, Trial]:
        yield Install(trial.candidate.plan, notes_messages=True)
        steps_s = yield from self._timed(hopeless_s)
        return self._note(replace(trial, visits_s=(*trial.visits_s, steps_s)))

    def _note(self, trial: Trial) -> Trial:
        """In the place of what was known of the candidate."""
        trials = {one.candidate: one for one in self.findings.trials}
        trials[trial.candidate] = trial
        self.findings = replace(self.findings, trials=tuple(trials.values()))
        return trial

    def _trial_of(self, candidate: Candidate) -> Trial:
        return next(trial for trial in self.findings.trials if trial.candidate == candidate)

    def _why_nothing(self, candidates: tuple[Candidate, ...], baseline: Trial) -> str:
        trace = self.findings.trace
        assert trace is not None
        if len(self.findings.trials) > 1:
            return f"nothing that was tried is faster than {self.task.baseline}"
        best = min(candidates, key=lambda one: one.predicted_s)
        timeline = self._predicted(baseline.candidate.plan)
        return why_nothing_is_gained(
            timeline, trace, step_s=baseline.step_s, best_s=best.predicted_s
        )

    def _settle(self, best: Candidate) -> Course:
        yield Install(best.plan)
        found, predicted = self.findings, self._predicted(best.plan)
        steps, seconds = found.steps - self._began_at, found.elapsed_s - self._began_s
        self.findings = replace(
            found,
            stage=Stage.SETTLED,
            plan=best.plan,
            predicted=predicted,
            planning_steps=steps,
            planning_s=seconds,
            waits_for=None,
        )
        self._say(logging.INFO, planning_ended(self.findings, baseline=self.task.baseline))
        assert found.trace is not None
        assert found.network is not None
        self._judge(best.plan, found.trace, found.network)

    def _judge(self, plan: Plan, trace: Trace, network: Network) -> None:
        worth = verdict(trace, plan, network, workers=self.task.workers)
        self.findings = replace(self.findings, worth=worth)
        if worth is not None and not worth.pays:
            self._say(logging.WARNING, str(worth))

    def _predicted(self, plan: Plan) -> Timeline:
        """By what is known now."""
        trace, network = self.findings.trace, self.findings.network
        assert trace is not None
        assert network is not None
        return simulate(trace, plan, network, workers=self.task.workers)

    def _until_drift(self, most: float) -> Course:
        """Until steps take another time than when the plan was chosen, by this share.

        Not than predicted: a prediction knows nothing of loading data and the like. Where it is
        unknown what they took, the first steps tell. Of a remembered plan nobody minds if they are
        faster: that was another run.
        """
        settling_steps = SETTLING_STEPS
        while True:
            timed: StepsTimed = yield TimeSteps(DRIFT_STEPS, settling_steps)
            settling_steps = 0
            now_s = median(timed.steps_s)
            before_s = self.findings.step_s or now_s
            self.findings = replace(self.findings, step_s=before_s)
            drift_s = now_s - before_s
            if (drift_s if self.findings.is_remembered else abs(drift_s)) > most * before_s:
                self._say(
                    logging.WARNING,
                    f"steps were expected to take {before_s * 1e3:.1f} ms and take "
                    f"{now_s * 1e3:.1f} ms; planning again",
                )
                return

"""From a model that has just been wrapped to the fastest plan for it, while it trains.

The course is a generator, and each ``yield`` is one synchronised training step. All ranks take the
same course, step by step: what decides is agreed on first.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from statistics import median
from typing import Literal

import msgspec
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from gradweave.comm.agree import broadcast_text, group_device, largest
from gradweave.compression import Compression
from gradweave.costs.sparse import BYTES_PER_ELEMENT
from gradweave.network import Network
from gradweave.plan import Plan, merge
from gradweave.recipe import Recipe
from gradweave.runtime.candidates import Candidate, shortlist, torch_lengths
from gradweave.runtime.findings import Findings
from gradweave.runtime.given import require_fit
from gradweave.runtime.options import Options, is_whole
from gradweave.runtime.survey import Survey
from gradweave.runtime.thinning import LAST_STEP, compression_at, verdict, with_sparse_prices
from gradweave.runtime.trials import Trial, finalists, winner
from gradweave.simulation import simulate
from gradweave.sparse.training import SparseTraining
from gradweave.timeline import Timeline
from gradweave.trace import Trace
from gradweave.words import Passes

logger = logging.getLogger(__name__)

# torch's first steps after a change follow the order of declaration, and allocate.
SETTLING_STEPS = 3
DRIFT_STEPS = 20

# What the wrapper does when it is given other buckets: everything in one, while times are recorded,
# a candidate's, or torch's own.
Adopt = Callable[[Candidate | Literal["one bucket", "torch's own"]], None]


class Pilot:
    """Knows what to do at each step boundary; the wrapper calls ``step`` there."""

    def __init__(
        self,
        options: Options,
        *,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        make_group: Callable[[], dist.ProcessGroup],
        adopt: Adopt,
        keeps_declared_order: bool,
        torch_cap_mb: float | None,
        given: Plan | Recipe | None,
        passes: Passes = "backward",
        sparse: SparseTraining | None = None,
    ) -> None:
        self.found = Findings()
        self._sparse = sparse
        self._passes: Passes = passes
        self._options, self._parameters = options, parameters
        self._group, self._adopt = group, adopt
        self._keeps_declared_order, self._torch_cap_mb = keeps_declared_order, torch_cap_mb
        self._given_plan = given
        self._device = group_device(group)
        self._now_s: Callable[[], float] = time.perf_counter
        self._survey = Survey(
            options,
            module=module,
            parameters=parameters,
            group=group,
            make_group=make_group,
            keeps_declared_order=keeps_declared_order,
            passes=passes,
        )
        self._course: Generator[None] | None = self._whole_course()

    def step(self, batch_size: int) -> None:
        """A synchronised training step begins; the one before it is over on this rank."""
        self._survey.batch_size = batch_size
        try:
            if self._course is not None and next(self._course, "over") == "over":
                self._course = None
        except BaseException as error:
            self._course = None
            self.found.stage, self.found.note = "settled", f"planning failed: {error}"
            raise

    def begin_pass(self) -> None:
        """Of the step's forward passes the one whose gradients travel begins."""
        self._survey.begin_pass()

    def close(self) -> None:
        """Leave no hook and no thread behind."""
        if self._course is not None:
            self._course.close()
            self._course = None

    @property
    def is_settled(self) -> bool:
        return self.found.stage == "settled"

    @property
    def may_change(self) -> bool:
        """Whether there may be other buckets than now."""
        is_open = not self.is_settled or self._options.replan_when is not None
        return self._course is not None and is_open

    def stop(self, why: str) -> None:
        """Keep what there is; from now on nothing is measured and nothing changes."""
        is_plain = self._given_plan is not None or is_whole(self._options.compression)
        if self.found.stage == "not begun" and is_plain:
            self.step(self._survey.batch_size)  # neither needs planning
        if self._course is not None and self.is_settled and self._options.replan_when is not None:
            logger.warning("no more planning again: %s", why)
        self.close()
        if self.found.plan is not None or self.found.is_whole:
            self.found.stage = "settled"
        if not self.is_settled:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.found.stage, self.found.note = "settled", why
        self.found.plan = None
        self._adopt("torch's own")
        logger.warning("keeping torch's own buckets: %s", why)

    def _whole_course(self) -> Generator[None]:
        if self._sparse is not None and is_whole(self._options.compression):
            self.found.is_whole = True
            self._adopt("one bucket")
            yield
            if self._group.size() > 1:
                yield from self._judged(self._sparse)
            self.found.stage = "settled"
            return
        given = self._given_plan
        if given is not None:
            yield from self._given(given)
            yield from self._until_drift()
        while (yield from self._planned()):
            yield from self._until_drift()

    def _given(self, given: Plan | Recipe) -> Iterator[None]:
        plan = given if isinstance(given, Plan) else given.plan
        require_fit(plan, self._parameters, self._group)
        self.found.plan, self.found.is_given = plan, True
        if isinstance(given, Recipe):
            self.found.trace, self.found.network = given.trace, given.network
            self.found.predicted = self._predicted(plan, given.trace, given.network)
            self.found.step_s = given.step_s
            self._judge(plan, given.trace, given.network)
        self._adopt(Candidate(plan=plan, predicted_s=0.0))
        self.found.stage = "settled"
        logger.info("%d messages as given, planned by %s", len(plan.buckets), plan.planner)
        yield

    def _planned(self) -> Generator[None, None, bool]:
        """Record and calibrate, plan, try, choose; whether there is a plan in the end."""
        measured = yield from self._measured()
        if isinstance(measured, str):
            self._give_up(measured)
            return False
        trace, network = measured
        compression = None
        if self._sparse is not None:
            network = yield from self._warmed_up(self._sparse, trace, network)
            compression = compression_at(self._sparse.settings)
        self.found.trace, self.found.network = trace, network
        candidates = self._candidates(trace, network, compression)
        self.found.stage, self.found.plan = "trying", None
        best = candidates[0]
        if self._options.trial_steps:
            best = yield from self._fastest(candidates)
        self._settle(best, trace, network)
        return True

    def _measured(self) -> Generator[None, None, tuple[Trace, Network] | str]:
        """What the survey finds, or why there is nothing, in words."""
        widths = {parameter.element_size() for parameter in self._parameters.values()}
        if self._sparse is not None and widths != {BYTES_PER_ELEMENT}:
            return "sparse messages have a price for gradients of 4 bytes only"
        self.found = Findings(stage="recording", is_whole=self.found.is_whole)
        if not self.found.is_whole:
            self._adopt("one bucket")
        return (yield from self._survey.measured())

    def _warmed_up(
        self, sparse: SparseTraining, trace: Trace, network: Network
    ) -> Generator[None, None, Network]:
        """Until the last density has come, by the best plan for each; then the prices for that.

        What is tried before would be chosen for messages that are many times as large.
        """
        while True:
            priced = self._priced(network, sparse, sparse.step)
            now = compression_at(sparse.settings, sparse.step)
            if now == compression_at(sparse.settings):
                return priced
            best = self._candidates(trace, priced, now)[0]
            self._adopt(best)
            self.found.trace, self.found.network = trace, priced
            self.found.stage, self.found.plan = "warming up", best.plan
            self.found.predicted = self._predicted(best.plan, trace, priced)
            while compression_at(sparse.settings, sparse.step) == now:
                yield

    def _priced(self, network: Network, sparse: SparseTraining, step: int) -> Network:
        return with_sparse_prices(
            network,
            sparse.settings,
            sparse.sparsifier.exchanger,
            numel=sum(parameter.numel() for parameter in self._parameters.values()),
            like=next(iter(self._parameters.values())),
            step=step,
        )

    def _judged(self, sparse: SparseTraining) -> Generator[None]:
        """Whether it pays to send the whole model as one sparse message; it is done in any case."""
        measured = yield from self._measured()
        if isinstance(measured, str):
            self.found.note = measured
            return
        trace, network = measured
        priced = self._priced(network, sparse, LAST_STEP)
        plan = merge(
            trace,
            [len(trace.tensors)],
            planner="whole model",
            collective="native",
            compression=compression_at(sparse.settings),
        )
        self.found.trace, self.found.network = trace, priced
        self._judge(plan, trace, priced)

    def _candidates(
        self, trace: Trace, network: Network, compression: Compression | None
    ) -> list[Candidate]:
        """Rank 0 decides; what it says travels as JSON."""
        text = ""
        if self._group.rank() == 0:
            found = shortlist(
                trace,
                network,
                workers=self._group.size(),
                planner=self._options.planner,
                collectives=network.collectives,
                torchs_lengths=torch_lengths(
                    trace,
                    bucket_cap_mb=self._torch_cap_mb,
                    is_declared=self._keeps_declared_order,
                ),
                compression=compression,
                passes=self._passes,
            )
            text = msgspec.json.encode(found).decode()
        text = broadcast_text(self._group, text, device=self._device)
        return msgspec.json.decode(text, type=list[Candidate])

    def _fastest(self, candidates: list[Candidate]) -> Generator[None, None, Candidate]:
        trials = self.found.trials
        for candidate in candidates:
            step_s = yield from self._tried(candidate)
            trials.append(Trial(candidate=candidate, rounds_s=(step_s,)))
        for candidate in finalists(trials):
            step_s = yield from self._tried(candidate)
            place = candidates.index(candidate)
            trials[place] = replace(trials[place], rounds_s=(*trials[place].rounds_s, step_s))
        best = winner(trials)
        self.found.step_s = best.step_s
        return best.candidate

    def _tried(self, candidate: Candidate) -> Generator[None, None, float]:
        require_fit(candidate.plan, self._parameters, self._group)
        self._adopt(candidate)
        for _ in range(SETTLING_STEPS):
            yield
        return (yield from self._step_s(self._options.trial_steps))

    def _step_s(self, steps: int) -> Generator[None, None, float]:
        """The median of so many steps, each as long as on the slowest rank."""
        times_s = []
        for _ in range(steps):
            started_s = self._now_s()
            yield
            times_s.append(self._now_s() - started_s)
        return median(largest(self._group, times_s, device=self._device))

    def _settle(self, best: Candidate, trace: Trace, network: Network) -> None:
        self._adopt(best)
        self.found.plan = best.plan
        self.found.predicted = self._predicted(best.plan, trace, network)
        self.found.stage = "settled"
        logger.info(
            "%d tensors in %d messages, planned by %s, predicted %.1f ms an iteration",
            len(trace.tensors),
            len(best.plan.buckets),
            best.plan.planner,
            best.predicted_s * 1e3,
        )
        self._judge(best.plan, trace, network)

    def _judge(self, plan: Plan, trace: Trace, network: Network) -> None:
        self.found.worth = verdict(trace, plan, network, workers=self._group.size())
        if self.found.worth is not None and not self.found.worth.pays:
            logger.warning("%s", self.found.worth)

    def _predicted(self, plan: Plan, trace: Trace, network: Network) -> Timeline:
        return simulate(trace, plan, network, workers=self._group.size())

    def _until_drift(self) -> Iterator[None]:
        """Ends when steps take another time than when the plan was chosen.

        Not than predicted: a prediction knows nothing of loading data and the like. Where it is
        unknown what they took, the first steps tell.
        """
        if self._options.replan_when is None:
            while True:
                yield
        for _ in range(SETTLING_STEPS):
            yield
        while True:
            now_s = yield from self._step_s(DRIFT_STEPS)
            expected_s = self.found.step_s = self.found.step_s or now_s
            if abs(now_s / expected_s - 1) > self._options.replan_when:
                logger.warning(
                    "steps were expected to take %.1f ms and take %.1f ms; planning again",
                    expected_s * 1e3,
                    now_s * 1e3,
                )
                return

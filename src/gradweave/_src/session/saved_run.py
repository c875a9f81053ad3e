"""The run that a training leaves behind, put together from what its ranks have noted."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import isfinite
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.errors import PlanMismatch, RequestError, UnknownCost
from gradweave._src.network import Network
from gradweave._src.phases import PHASES, Phases
from gradweave._src.plan import Bucket, Plan
from gradweave._src.results import Losses, LossSeries, Result, Results, StageBegin
from gradweave._src.runs import Run
from gradweave._src.session.findings import Findings
from gradweave._src.session.learning import MessageTimes, learnt_network, samples_of
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Span, Timeline
from gradweave._src.trace import Tensor, Trace
from gradweave._src.training_record import Account, Steps, TriedPlan
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import Operation

logger = logging.getLogger(__name__)

# Step times are written to the microsecond: no training is the same to the next digit.
DIGITS = 6
# Where no phases were seen, an iteration is the median of so many last steps.
LAST_STEPS = 64


class RankNotes(Struct, frozen=True, kw_only=True):
    """What one rank tells of itself."""

    host: str
    phases: tuple[Phases, ...]  # of its last steps
    notes_timelines: bool


class Training(Struct, frozen=True, kw_only=True):
    """What is known of a training when its run is to be kept."""

    runtime: str
    command: str  # for people
    findings: Findings
    explanation: str
    tensors: tuple[Tensor, ...]  # of the model, in declared order; their times are not known
    model: str
    plan: Plan  # that is carried out
    step_s: tuple[float, ...]  # rank 0's
    stages: tuple[StageBegin, ...]
    ranks: tuple[RankNotes, ...]
    timelines: tuple[Timeline, ...] = ()  # of all ranks, or none

    @property
    def workers(self) -> int:
        return len(self.ranks)


def run_of(training: Training) -> Run:
    """Put a run together; raise RequestError where there is nothing to keep yet."""
    if not training.step_s:
        raise RequestError("no step was seen to end; save the run after some steps")
    phases = tuple(_median_phases(rank.phases) for rank in training.ranks)
    training = replace(training, plan=_of_tensors(training.plan, training.tensors))
    trace = _in_order_of(training.plan, _trace(training, phases))
    timelines = tuple(_of_trace(timeline, trace) for timeline in training.timelines)
    network = training.findings.network or _learnt(training, trace)
    predicted = _predicted(training, trace, network)
    return Run(
        trace=trace,
        network=network,
        results=Results(
            command=training.command, rows=(_result(training, trace, phases, predicted),)
        ),
        plans={training.runtime: training.plan},
        predicted={} if predicted is None else {training.runtime: predicted},
        measured={training.runtime: timelines} if timelines else {},
        steps=Steps(
            step_s=tuple(round(step_s, DIGITS) for step_s in training.step_s),
            stages=training.stages,
            phases=phases,
        ),
        account=account_of(training.findings, training.explanation),
    )


def unplanned(names: Iterable[Sequence[str]], way: Travel) -> Plan:
    """Return a plan of what travels together, and how, where nobody has planned it."""
    buckets = (
        Bucket(tensors=tuple(together), collective=way.collective, compression=way.compression)
        for together in names
    )
    return Plan(planner="ddp", buckets=tuple(buckets))


def account_of(found: Findings, explanation: str) -> Account:
    return Account(
        stage=str(found.stage),
        planning_steps=found.planning_steps,
        planning_s=found.planning_s,
        baseline_step_s=found.baseline_step_s,
        step_s=found.step_s,
        gain=found.gain,
        trials=tuple(
            TriedPlan(
                planner=trial.candidate.plan.planner,
                messages=len(trial.candidate.plan.buckets),
                ways=tuple(sorted({str(b.travel) for b in trial.candidate.plan.buckets})),
                predicted_s=trial.candidate.predicted_s,
                rounds_s=trial.rounds_s,
                is_baseline=trial.candidate.is_baseline,
                is_chosen=trial.candidate.plan == found.plan,
            )
            for trial in found.trials
        ),
        note=found.note,
        explanation=explanation,
    )


# A loss for each step since the model was wrapped, or pairs of a step, counted from 0, and its
# loss.
StepLosses = Iterable[float] | Iterable[tuple[int, float]]


def losses_of(given: StepLosses | None, training: Training) -> Losses | None:
    """Return losses over steps and seconds, from a number for each step or pairs of step and loss.

    Those that are not finite are left out. Raise RequestError where they do not fit the steps.
    """
    if given is None:
        return None
    ends_s = list(accumulate(training.step_s))
    pairs = list(_pairs(given, len(ends_s)))
    for step, _ in pairs:
        if not 0 <= step < len(ends_s):
            raise RequestError(
                f"losses: there is one of step {step}, and there were {len(ends_s)} steps, counted "
                "from 0; give pairs of steps since the model was wrapped and losses"
            )
    finite = [(step, loss) for step, loss in pairs if isfinite(loss)]
    if len(finite) < len(pairs):
        logger.warning("%d losses that are not finite are left out", len(pairs) - len(finite))
    if not finite:
        return None
    try:
        series = LossSeries(
            label=training.runtime,
            steps=tuple(step for step, _ in finite),
            losses=tuple(loss for _, loss in finite),
            wall_s=tuple(round(ends_s[step], DIGITS) for step, _ in finite),
            stages=training.stages if len(training.stages) > 1 else (),
        )
    except ValueError as error:
        raise RequestError(f"losses: {error}") from None
    return Losses(series=(series,))


def _pairs(given: StepLosses, steps: int) -> Iterator[tuple[int, float]]:
    try:
        listed: list[Any] = list(given)  # of whatever types users have
        if all(isinstance(one, tuple | list) for one in listed):
            yield from ((int(step), float(loss)) for step, loss in listed)
            return
        plain = [float(loss) for loss in listed]
    except (TypeError, ValueError):
        raise RequestError(
            "losses must be numbers, one for each step, or pairs of step and loss"
        ) from None
    if len(plain) != steps:
        raise RequestError(
            f"losses: there are {len(plain)} and there were {steps} steps; give one for each, or "
            "pairs of step and loss"
        )
    yield from enumerate(plain)


def _median_phases(phases: Sequence[Phases]) -> Phases | None:
    if not phases:
        return None
    medians_s = {f"{name}_s": median(one.seconds(name) for one in phases) for name in PHASES}
    return Phases(**{name: round(seconds, DIGITS) for name, seconds in medians_s.items()})


def _result(
    training: Training,
    trace: Trace,
    phases: Sequence[Phases | None],
    predicted: Timeline | None,
) -> Result:
    """Return the row of the rank that computes longest, for which the others wait.

    An iteration is forward, backward and waiting for the network, as in other results. What lies
    between two of them is in steps.json.
    """
    slowest = _slowest(phases)
    if slowest is None:
        since = training.stages[-1].step if training.stages else 0
        repeats_s = list(training.step_s[since:] or training.step_s)[-LAST_STEPS:]
        compute_s = exposed_s = None
    else:
        rank = phases.index(slowest)
        repeats_s = [one.step_s - one.input_s for one in training.ranks[rank].phases]
        compute_s, exposed_s = slowest.forward_s + slowest.backward_s, slowest.network_s
    iteration_s = median(repeats_s)
    predicted_s = None if predicted is None else predicted.iteration_s
    hosts = [rank.host for rank in training.ranks]
    ranks_of_hosts = {hosts.count(host) for host in hosts}
    return Result(
        trace=trace.name,
        runtime=training.runtime,
        workers=training.workers,
        nodes=len(set(hosts)),
        ranks_per_node=ranks_of_hosts.pop() if len(ranks_of_hosts) == 1 else None,
        rate=None,
        iteration_s=iteration_s,
        predicted_s=predicted_s,
        prediction_error=None if predicted_s is None else predicted_s / iteration_s - 1,
        compute_s=compute_s,
        exposed_s=exposed_s,
        messages=len(training.plan.buckets),
        speedup=None,
        repeats_s=tuple(round(one_s, DIGITS) for one_s in repeats_s),
        correct=None,
        bucket_cap_mb=None,
    )


def _slowest(phases: Sequence[Phases | None]) -> Phases | None:
    seen = [one for one in phases if one is not None]
    return max(seen, key=lambda one: one.forward_s + one.backward_s, default=None)


def _trace(training: Training, phases: Sequence[Phases | None]) -> Trace:
    """Return the trace that was recorded, or the passes as the ranks' clocks saw them."""
    if training.findings.trace is not None:
        return training.findings.trace
    slowest = _slowest(phases)
    if slowest is None:
        raise RequestError(
            "it was not recorded when gradients are ready, and no step was timed from its "
            "beginning to its end; save the run after some more steps"
        )
    return estimated_trace(training.tensors, slowest, name=training.model)


def estimated_trace(tensors: Sequence[Tensor], phases: Phases, *, name: str) -> Trace:
    """Return a trace of passes as long as measured, shared among gradients by their bytes.

    ``tensors`` are in the order of declaration, which backward turns round.
    """
    whole = sum(tensor.nbytes for tensor in tensors)
    ready_bytes = accumulate(tensor.nbytes for tensor in reversed(tensors))
    return Trace(
        name=name,
        batch_size=1,
        origin="estimated",
        source="forward and backward as a clock saw them, shared among gradients by their bytes; "
        "batches are counted, not samples",
        tensors=tuple(
            replace(
                tensor,
                ready_s=phases.backward_s * ready / whole,
                forward_s=phases.forward_s * tensor.nbytes / whole,
            )
            for tensor, ready in zip(reversed(tensors), ready_bytes, strict=True)
        ),
    )


def _in_order_of(plan: Plan, trace: Trace) -> Trace:
    """Return the trace in the plan's order; the plan is what ran, so it has all gradients."""
    order = [name for bucket in plan.buckets for name in bucket.tensors]
    if [tensor.name for tensor in trace.tensors] == order:
        return trace
    if {tensor.name for tensor in trace.tensors} != set(order):
        raise PlanMismatch(
            "the plan sends other gradients than were recorded; plan again for this model"
        )
    return trace.in_order(order)


def _of_tensors(plan: Plan, tensors: Sequence[Tensor]) -> Plan:
    """Return the plan without parameters that have no elements, which planners do not know."""
    known = {tensor.name for tensor in tensors}
    left = (tuple(name for name in bucket.tensors if name in known) for bucket in plan.buckets)
    pairs = zip(plan.buckets, left, strict=True)
    buckets = tuple(replace(bucket, tensors=names) for bucket, names in pairs if names)
    return replace(plan, buckets=buckets)


def _of_trace(timeline: Timeline, trace: Trace) -> Timeline:
    """Return the timeline without parameters that have no elements, which weigh nothing."""
    known = {tensor.name for tensor in trace.tensors}
    if all(name in known for span in timeline.spans for name in span.tensors):
        return timeline

    def known_part(span: Span) -> Span:
        return replace(span, tensors=tuple(name for name in span.tensors if name in known))

    left = (known_part(span) for span in timeline.spans)
    return Timeline(spans=tuple(s for s in left if s.tensors or s.lane != "communication"))


def _predicted(training: Training, trace: Trace, network: Network | None) -> Timeline | None:
    found = training.findings
    if found.predicted is not None and found.plan == training.plan:
        return found.predicted
    return predicted_of(trace, training.plan, network, workers=training.workers)


def predicted_of(
    trace: Trace, plan: Plan, network: Network | None, *, workers: int
) -> Timeline | None:
    """Predict a step; None where nobody knows what the plan's messages cost."""
    if network is None:
        return None
    try:
        return simulate(trace, plan, network, workers=workers)
    except UnknownCost:
        return None


def _learnt(training: Training, trace: Trace) -> Network | None:
    """Return what the messages of the last step tell, where they were noted."""
    noted = [message_times(timeline, training.plan) for timeline in training.timelines]
    return network_from([noted], trace) if noted else None


def network_from(steps: Iterable[Sequence[Sequence[MessageTimes]]], trace: Trace) -> Network | None:
    """Return the network as these steps' messages show it, or None where they show too little."""
    by_step = list(steps)
    workers = max((len(ranks) for ranks in by_step), default=1)
    if workers == 1:
        return None
    samples = [sample for ranks in by_step for sample in samples_of(ranks)]
    model_bytes = int(trace.nbytes.sum())
    try:
        return learnt_network(samples, workers=workers, model_bytes=model_bytes)
    except ValueError as error:
        logger.warning("what messages cost is not known: %s", error)
        return None


TRAINING_OPERATIONS: tuple[Operation, ...] = ("all-reduce", "reduce-scatter", "all-gather")


def message_times(timeline: Timeline, plan: Plan) -> tuple[MessageTimes, ...]:
    """Return the messages that a recorder has seen, each with the way that the plan sends it."""
    way_of = {name: str(bucket.travel) for bucket in plan.buckets for name in bucket.tensors}
    return tuple(
        MessageTimes(
            operation=operation,
            collective=way_of[span.tensors[0]],
            nbytes=span.nbytes,
            ready_s=span.start_s,
            done_s=span.end_s,
        )
        for span in timeline.spans
        for operation in TRAINING_OPERATIONS
        if span.label.startswith(f"{operation} ") and span.tensors and span.tensors[0] in way_of
    )

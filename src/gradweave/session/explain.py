"""What happened to a wrapped model, in a few sentences."""

from collections.abc import Sequence

from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.session.findings import Findings, Stage
from gradweave.session.trials import Trial
from gradweave.simulation import simulate
from gradweave.trace import Trace


def explanation(found: Findings, *, workers: int, baseline: str = "torch's own buckets") -> str:
    """Say how messages travel and why so; ``baseline`` is what travels without a plan."""
    worth = [] if found.worth is None else [str(found.worth)]
    return "\n".join([*_how(found, workers, baseline), *worth])


def _how(found: Findings, workers: int, baseline: str) -> list[str]:
    """How messages travel, and why so."""
    if found.is_whole:
        unknown = [] if found.note is None else [f"Whether that pays is unknown: {found.note}."]
        return ["The whole model travels as one sparse message.", *unknown]
    plan = found.plan
    if plan is not None and found.stage is Stage.WARMING_UP:
        return [f"{_buckets(plan)}, planned by {plan.planner}, until the density is the last one."]
    if found.stage is not Stage.SETTLED:
        return [f"No plan yet: {found.stage}."]
    if plan is None:
        return [f"{baseline} stay: {found.note}."]
    if found.trace is None or found.network is None or not found.trials:
        how = "as given" if found.is_given else f"planned by {plan.planner}"
        since = ", remembered from an earlier run" if found.is_remembered else ""
        return [f"{_buckets(plan)}, {how}{since}."]
    return [
        *_tried(found.trials, plan, found.trace, workers=workers, baseline=baseline),
        *_gain(found.trials, plan, found.trace, found.network, workers=workers, baseline=baseline),
    ]


def _tried(
    trials: Sequence[Trial], plan: Plan, trace: Trace, *, workers: int, baseline: str
) -> list[str]:
    measured = (
        f"Measured: {len(trace.tensors)} gradients, {trace.nbytes.sum() / 1e6:.1f} MB; "
        f"forward {trace.forward_s * 1e3:.1f} ms, backward {trace.backward_s * 1e3:.1f} ms; "
        f"{workers} workers."
    )
    lines = [measured]
    for trial in trials:
        tried = trial.candidate.plan
        name = baseline if trial.candidate.is_baseline else tried.planner
        times = " and ".join(f"{taken_s * 1e3:.1f}" for taken_s in trial.rounds_s)
        lines.append(
            f"Tried: {name}, {_buckets(tried)}: predicted "
            f"{trial.candidate.predicted_s * 1e3:.1f} ms an iteration, a step took "
            f"{times} ms{' (chosen)' if tried == plan else ''}."
        )
    return lines


def _gain(
    trials: Sequence[Trial],
    plan: Plan,
    trace: Trace,
    network: Network,
    *,
    workers: int,
    baseline: str,
) -> list[str]:
    unplanned = next(trial for trial in trials if trial.candidate.is_baseline)
    chosen = next(trial for trial in trials if trial.candidate.plan == plan)
    before_s, now_s = (
        simulate(trace, one, network, workers=workers).exposed_s
        for one in (unplanned.candidate.plan, plan)
    )
    ratio = unplanned.step_s / chosen.step_s
    exposed = f"{before_s * 1e3:.1f} ms with {baseline}, {now_s * 1e3:.1f} ms now"
    return [
        f"Chosen: {_buckets(plan)}, planned by {plan.planner}.",
        f"A step is {ratio:.2f}x as fast as with {baseline}.",
        f"Communication that nothing hides, predicted: {exposed}.",
    ]


def _buckets(plan: Plan) -> str:
    ways = sorted({str(bucket.compression or bucket.collective) for bucket in plan.buckets})
    count = len(plan.buckets)
    return f"{count} message{'s' if count > 1 else ''} by {', '.join(ways)}"

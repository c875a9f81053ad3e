"""What happened to a wrapped model, in a few sentences."""

from gradweave.plan import Plan
from gradweave.runtime.findings import Findings
from gradweave.runtime.thinning import verdict
from gradweave.simulation import simulate


def explanation(found: Findings | None, why_unplanned: str | None, *, workers: int) -> str:
    if found is None:
        return f"torch's own buckets stay: {why_unplanned}."
    if found.stage != "settled":
        return f"No plan yet: {found.stage}."
    if found.note is not None:
        return f"torch's own buckets stay: {found.note}."
    plan, trace, network = found.plan, found.trace, found.network
    if plan is None:
        return "The whole model travels as one sparse message."
    if trace is None or network is None or not found.trials:
        how = "as given" if found.is_given else f"planned by {plan.planner}"
        return "\n".join([f"{_buckets(plan)}, {how}.", *_worth(found, workers)])
    measured = (
        f"Measured: {len(trace.tensors)} gradients, {trace.nbytes.sum() / 1e6:.1f} MB; "
        f"forward {trace.forward_s * 1e3:.1f} ms, backward {trace.backward_s * 1e3:.1f} ms; "
        f"{workers} workers."
    )
    lines = [measured]
    for trial in found.trials:
        tried = trial.candidate.plan
        name = "torch's own" if trial.candidate.is_torchs else tried.planner
        times = " and ".join(f"{taken_s * 1e3:.1f}" for taken_s in trial.rounds_s)
        lines.append(
            f"Tried: {name}, {_buckets(tried)}: predicted "
            f"{trial.candidate.predicted_s * 1e3:.1f} ms an iteration, a step took "
            f"{times} ms{' (chosen)' if tried == plan else ''}."
        )
    torchs = next(trial for trial in found.trials if trial.candidate.is_torchs)
    chosen = next(trial for trial in found.trials if trial.candidate.plan == plan)
    before_s, now_s = (
        simulate(trace, one, network, workers=workers).exposed_s
        for one in (torchs.candidate.plan, plan)
    )
    lines.append(f"Chosen: {_buckets(plan)}, planned by {plan.planner}.")
    ratio = torchs.step_s / chosen.step_s
    lines.append(f"A step is {ratio:.2f}x as fast as with torch's own buckets.")
    lines.append(
        f"Communication that nothing hides, predicted: {before_s * 1e3:.1f} ms with torch's own "
        f"buckets, {now_s * 1e3:.1f} ms now."
    )
    return "\n".join([*lines, *_worth(found, workers)])


def _worth(found: Findings, workers: int) -> list[str]:
    if found.plan is None or found.trace is None or found.network is None:
        return []
    judged = verdict(found.trace, found.plan, found.network, workers=workers)
    return [] if judged is None else [str(judged)]


def _buckets(plan: Plan) -> str:
    ways = sorted({str(bucket.compression or bucket.collective) for bucket in plan.buckets})
    count = len(plan.buckets)
    return f"{count} message{'s' if count > 1 else ''} by {', '.join(ways)}"

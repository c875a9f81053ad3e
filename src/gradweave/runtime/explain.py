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
    if found.plan is None:
        return "The whole model travels as one sparse message."
    if found.trace is None or found.network is None or not found.trials:
        how = "as given" if found.is_given else f"planned by {found.plan.planner}"
        return "\n".join([f"{_buckets(found.plan)}, {how}.", *_worth(found, workers)])
    trace = found.trace
    measured = (
        f"Measured: {len(trace.tensors)} gradients, {trace.nbytes.sum() / 1e6:.1f} MB; "
        f"forward {trace.forward_s * 1e3:.1f} ms, backward {trace.backward_s * 1e3:.1f} ms; "
        f"{workers} workers."
    )
    lines = [measured]
    for trial in found.trials:
        plan = trial.candidate.plan
        name = "torch's own" if trial.candidate.is_torchs else plan.planner
        is_chosen = plan == found.plan
        times = " and ".join(f"{taken_s * 1e3:.1f}" for taken_s in trial.rounds_s)
        lines.append(
            f"Tried: {name}, {_buckets(plan)}: predicted "
            f"{trial.candidate.predicted_s * 1e3:.1f} ms an iteration, a step took "
            f"{times} ms{' (chosen)' if is_chosen else ''}."
        )
    lines.append(f"Chosen: {_buckets(found.plan)}, planned by {found.plan.planner}.")
    lines += _gain(found)
    before = found.trials[-1].candidate.plan if found.trials else None
    if before is not None:
        exposed_s = [
            simulate(found.trace, plan, found.network, workers=workers).exposed_s
            for plan in (before, found.plan)
        ]
        lines.append(
            f"Communication that nothing hides, predicted: {exposed_s[0] * 1e3:.1f} ms with "
            f"torch's own buckets, {exposed_s[1] * 1e3:.1f} ms now."
        )
    lines += _worth(found, workers)
    return "\n".join(lines)


def _worth(found: Findings, workers: int) -> list[str]:
    if found.plan is None or found.trace is None or found.network is None:
        return []
    judged = verdict(found.trace, found.plan, found.network, workers=workers)
    return [] if judged is None else [str(judged)]


def _gain(found: Findings) -> list[str]:
    by_plan = {trial.candidate.plan: trial.step_s for trial in found.trials}
    torchs = [trial.step_s for trial in found.trials if trial.candidate.is_torchs]
    if not torchs or found.plan not in by_plan:
        return []
    ratio = torchs[0] / by_plan[found.plan]
    return [f"A step is {ratio:.2f}x as fast as with torch's own buckets."]


def _buckets(plan: Plan) -> str:
    ways = sorted({bucket.collective for bucket in plan.buckets})
    count = len(plan.buckets)
    return f"{count} message{'s' if count > 1 else ''} by {', '.join(ways)}"

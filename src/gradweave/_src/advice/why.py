"""Why one way is faster than the others, in a sentence, from what a step consists of."""

from gradweave._src.advice.job import Job, PricedPlan
from gradweave._src.advice.option import Option
from gradweave._src.timeline import Timeline

# A smaller share of a step is not worth a change of anything.
LITTLE = 0.02


def why_first(job: Job, first: Option, planned: PricedPlan) -> str:
    """Say what decides how long a step takes, and what the first option does about it.

    What decides is looked for in steps with gradients as they are, in torch's buckets and in
    planned ones; ``planned`` is the step of the first option.
    """
    return f"{first.name} is first: {_what_decides(job)}; {_what_it_does(job, first, planned)}."


def _what_decides(job: Job) -> str:
    exact, torch = job.exact.timeline, job.torch_default.timeline
    if job.workers == 1:
        return "one worker sends nothing"
    if _waits_little(torch):
        return (
            f"nothing to gain on the network: backward hides all but {_ms(torch.exposed_s)} of "
            f"{_ms(torch.communication_s)}"
        )
    if _waits_little(exact):
        return (
            f"buckets decide: backward hides all but {_ms(exact.exposed_s)} where they are "
            f"planned, all but {_ms(torch.exposed_s)} in torch's"
        )
    startups_s = _startups_s(job)
    if 2 * startups_s > exact.communication_s:
        count = len(job.exact.plan.buckets)
        messages = f"{count:,} message{'s take' if count > 1 else ' takes'}"
        return (
            f"start-ups decide: {messages} {_ms(startups_s)} of {_ms(exact.iteration_s)} to begin"
        )
    megabytes = job.trace.nbytes.sum() / 1e6
    return (
        f"bytes, not start-ups, decide: {megabytes:,.0f} MB take {_ms(exact.communication_s)} "
        f"beside {_ms(exact.compute_s)} of computing"
    )


def _waits_little(timeline: Timeline) -> bool:
    return timeline.exposed_s <= LITTLE * timeline.iteration_s


def _startups_s(job: Job) -> float:
    """Return what the messages of the exact plan would take in all if they had no bytes."""
    return sum(
        job.network.seconds("all-reduce", bucket.collective, nbytes=0, workers=job.workers)
        for bucket in job.exact.plan.buckets
    )


def _what_it_does(job: Job, first: Option, planned: PricedPlan) -> str:
    timeline = planned.timeline
    if first.workers != job.workers:
        more = first.workers / job.workers
        longer = first.step_s / job.exact.step_s
        return f"{more:.3g} times the workers take {longer:.2f} times as long for a step"
    if first.accumulation > 1:
        return f"it sends once in {first.accumulation} passes"
    if planned.plan.passes == "both":
        return f"beside both passes all but {_ms(timeline.exposed_s)} is hidden"
    if any(bucket.compression for bucket in planned.plan.buckets):
        return f"made smaller, gradients take {_ms(timeline.communication_s)}"
    return "nothing that is known here is faster"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"  # noqa: PLR2004

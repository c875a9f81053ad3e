"""Why one way is faster than the others, in a sentence, from what a step consists of."""

import numpy as np

from gradweave.advice.job import Job, Planned
from gradweave.advice.option import Option

# Of a step: less is not worth a change of anything.
LITTLE = 0.02


def why_first(job: Job, first: Option, planned: Planned) -> str:
    """Say what decides how long a step takes, and what the first option does about it.

    What decides is looked for in the best step with gradients as they are; ``planned`` is the
    step of the first option.
    """
    return f"{first.name} is first: {_what_decides(job)}; {_what_it_does(job, first, planned)}."


def _what_decides(job: Job) -> str:
    plan, timeline = job.exact.plan, job.exact.timeline
    if job.workers == 1:
        return "one worker sends nothing"
    taken_s, exposed_s, step_s = timeline.communication_s, timeline.exposed_s, timeline.iteration_s
    if exposed_s <= LITTLE * step_s:
        return (
            f"nothing to gain on the network: backward hides all but {_ms(exposed_s)} of "
            f"{_ms(taken_s)}"
        )
    startups_s = _startups_s(job, job.exact)
    if 2 * startups_s > taken_s:
        count = len(plan.buckets)
        messages = f"{count:,} message{'s take' if count > 1 else ' takes'}"
        return f"start-ups decide: {messages} {_ms(startups_s)} of {_ms(step_s)} to begin"
    megabytes = job.trace.nbytes.sum() / 1e6
    return (
        f"bytes, not start-ups, decide: {megabytes:,.0f} MB take {_ms(taken_s)} beside "
        f"{_ms(timeline.compute_s)} of computing"
    )


def _startups_s(job: Job, planned: Planned) -> float:
    """What messages of no bytes would take, as many as there are."""
    nothing = np.zeros(1)
    return sum(
        float(
            job.network.cost(
                "all-reduce",
                bucket.collective,
                workers=job.workers,
                compression=bucket.compression,
            ).seconds(nothing)[0]
        )
        for bucket in planned.plan.buckets
    )


def _what_it_does(job: Job, first: Option, planned: Planned) -> str:
    timeline, torch = planned.timeline, job.torch_default.timeline
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
    if first.name.startswith("torch-ddp"):
        return "nothing that is known here is faster"
    return (
        f"computing waits for {_ms(timeline.exposed_s)} of it, in torch's buckets for "
        f"{_ms(torch.exposed_s)}"
    )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"  # noqa: PLR2004

"""What else could be done for a job: other buckets, passes, precisions, batches and workers."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from gradweave._src.advice.job import EQUALLY_FAST, Job
from gradweave._src.advice.memory import memory_bytes
from gradweave._src.advice.option import Advice, Option, Unpriced
from gradweave._src.advice.ways import SAME_BATCH, WAYS, Way
from gradweave._src.advice.why import why_first
from gradweave._src.errors import GradweaveError
from gradweave._src.network import Network
from gradweave._src.trace import Trace

__all__ = ["Advice", "Option", "Unpriced", "advise", "faster_with_same_batch"]


def advise(trace: Trace, network: Network, *, workers: int) -> Advice:
    """Compare all ways to train a model on a network by simulation, the fastest first.

    Args:
        trace: the model.
        network: what messages cost.
        workers: how many workers there are.

    Raises:
        UnknownCost: if the network knows nothing about so many workers.

    Examples:
        >>> trace, network = gradweave.load_trace("bert-base"), gradweave.load_network("k80-10gbe")
        >>> advice = gradweave.advise(trace, network, workers=16)
        >>> advice.options[0].gain > 1
        True
    """
    job = Job(trace, network, workers=workers)
    torch_s = job.torch_default.step_s
    ways, unpriced = _priced(job, WAYS)
    ordered = _fastest_first(ways)
    options = tuple(_option(name, way, job, compared_with_s=torch_s) for name, way in ordered)
    return Advice(
        trace=trace.name,
        network=network.name,
        workers=workers,
        options=options,
        unpriced=tuple(unpriced),
        why=why_first(job, options[0], ordered[0][1].planned),
        extrapolated_from_bytes=_extrapolated_from(job),
    )


def faster_with_same_batch(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    than_s: float,
    passes: int = 1,
    roundings: Collection[str] = (),
) -> tuple[Option, ...]:
    """Return ways with clearly shorter steps than ``than_s``, for the same batch and workers.

    Among ways that change the same thing only the fastest is returned, and ways without a price are
    left out, as are those that would round to nothing but ``roundings``, which plans may use
    already. Of a step's ``passes`` the last is synchronised; the others take equally long in any
    way.
    """
    job = Job(trace, network, workers=workers)
    others_s = (passes - 1) * trace.compute_s
    ways, _ = _priced(job, SAME_BATCH)
    other = [(name, way) for name, way in ways if not way.is_among(roundings)]
    faster = [(name, way) for name, way in other if way.step_s + others_s < (1 - CLEARLY) * than_s]
    ordered = _fastest_first(faster)
    first_of_its_kind = {way.changes: (name, way) for name, way in reversed(ordered)}
    return tuple(
        _in_steps_of(_option(name, way, job, compared_with_s=than_s), passes, others_s)
        for name, way in ordered
        if first_of_its_kind[way.changes] == (name, way)
    )


# A way that gains a smaller share of a step is not worth a sentence.
CLEARLY = 0.05

NamedWay = tuple[str, Way]


def _priced(job: Job, names: Iterable[str]) -> tuple[list[NamedWay], list[Unpriced]]:
    ways, unpriced = [], []
    for name in names:
        try:
            ways.append((name, WAYS[name](job)))
        except GradweaveError as error:
            unpriced.append(Unpriced(name=name, reason=str(error)))
    return ways, unpriced


def _fastest_first(ways: Sequence[NamedWay]) -> list[NamedWay]:
    """Sort ways by speed; of those that are about as fast, the one that changes least is first."""
    left = sorted(ways, key=lambda named: -named[1].samples_per_s)
    places = list(WAYS)
    ordered: list[NamedWay] = []
    while left:
        least = (1 - EQUALLY_FAST) * left[0][1].samples_per_s
        equal = [named for named in left if named[1].samples_per_s >= least]
        left = left[len(equal) :]
        ordered += sorted(equal, key=lambda named: (named[1].change, places.index(named[0])))
    return ordered


def _option(name: str, way: Way, job: Job, *, compared_with_s: float) -> Option:
    compared_with = job.workers * job.trace.batch_size / compared_with_s
    return Option(
        name=name,
        workers=way.workers,
        accumulation=way.accumulation,
        compute_s=way.compute_s,
        exposed_s=way.planned.timeline.exposed_s,
        step_s=way.step_s,
        samples_per_s=way.samples_per_s,
        gain=way.samples_per_s / compared_with,
        messages=len(way.planned.plan.buckets),
        memory_bytes=memory_bytes(job.trace, way.planned.plan, workers=way.workers),
        changes=way.changes,
        code=way.code,
    )


def _in_steps_of(option: Option, passes: int, others_s: float) -> Option:
    """Return the option for steps of several passes, of which only the last is synchronised."""
    if passes == 1:
        return option
    step_s = option.step_s + others_s
    slower = option.step_s / step_s
    return replace(
        option,
        accumulation=passes,
        compute_s=option.compute_s + others_s,
        step_s=step_s,
        samples_per_s=option.samples_per_s * passes * slower,
        gain=option.gain * slower,
    )


def _extrapolated_from(job: Job) -> int | None:
    plan = job.exact.plan
    known_to_bytes = min(
        job.network.cost("all-reduce", name, workers=job.workers).known_to_bytes
        for name in {bucket.collective for bucket in plan.buckets}
    )
    return None if plan.bucket_bytes(job.trace).max() <= known_to_bytes else int(known_to_bytes)

"""The ways to train that are compared. A new one is one function and one line in ``WAYS``."""

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from functools import partial

from msgspec import Struct

from gradweave._src.advice.job import Job, PricedPlan
from gradweave._src.compression import DEFAULT_DENSITY, ROUNDED_TO, Compression, RoundingName
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import MIB, parse_bytes, parse_spec

TORCH = "torch.nn.parallel.DistributedDataParallel"
OURS, SHARDED = "gradweave.DistributedDataParallel", "gradweave.ShardedDataParallel"

SPARSE = Compression(method="gtopk", density=DEFAULT_DENSITY)


class Change(IntEnum):
    """How much of the results of training is touched, the least first."""

    NOTHING = 0  # but the order of summation
    ROUNDING_TO_16_BITS = 1
    ROUNDING_TO_8_BITS = 2
    BATCH = 3
    THINNING = 4


class Way(Struct, frozen=True, kw_only=True):
    """A way to train: its plan, its batch, and the code that switches it on."""

    planned: PricedPlan
    trace: Trace
    workers: int
    change: Change
    changes: str  # in words
    code: str
    accumulation: int = 1
    rounds_to: frozenset[str] | None = None  # None where it never rounds

    def is_among(self, roundings: Collection[str]) -> bool:
        """Return whether a wrapper whose plans may use these roundings does this already.

        A way whose wrapper must be told a collective is not among them.
        """
        is_by_itself = self.planned.choice.argument is None
        rounds_alike = self.rounds_to is not None and self.rounds_to <= set(roundings)
        return is_by_itself and rounds_alike

    @property
    def step_s(self) -> float:
        """The seconds of one step, in which all passes but the last only compute."""
        return (self.accumulation - 1) * self.trace.compute_s + self.planned.step_s

    @property
    def compute_s(self) -> float:
        return self.accumulation * self.trace.compute_s

    @property
    def samples_per_s(self) -> float:
        return self.accumulation * self.workers * self.trace.batch_size / self.step_s


def _exactly(job: Job, planned: PricedPlan, code: str) -> Way:
    """Return a way that changes nothing in the results."""
    return Way(
        planned=planned,
        trace=job.trace,
        workers=job.workers,
        change=Change.NOTHING,
        changes="nothing",
        code=code,
    )


def _torch_default(job: Job) -> Way:
    return _exactly(job, job.torch_default, f"{TORCH}(model)")


def _torch_best_cap(job: Job) -> Way:
    planned = job.torch_best_cap
    size = parse_spec(planned.plan.planner).argument
    if size is None:  # torch's own caps are the best
        return _torch_default(job)
    return _exactly(job, planned, f"{TORCH}(model, bucket_cap_mb={parse_bytes(size) / MIB:g})")


def _exact(job: Job) -> Way:
    return _exactly(job, job.exact, _call(OURS, job.exact))


def _both_passes(job: Job) -> Way:
    wrapper = _call(SHARDED, job.both_passes)
    code = f"model = {wrapper}; optimizer = torch.optim.Adam(model.parameters())"
    return _exactly(job, job.both_passes, code)


def _rounded(job: Job, *, precision: str, roundings: tuple[RoundingName | None, ...]) -> Way:
    planned = job.rounded(roundings)
    used = _roundings_of(planned.plan)
    eight, sixteen = Change.ROUNDING_TO_8_BITS, Change.ROUNDING_TO_16_BITS
    return Way(
        planned=planned,
        trace=job.trace,
        workers=job.workers,
        change=eight if "int8" in used else sixteen if used else Change.NOTHING,
        changes=f"each hop is rounded to {' or '.join(used)}" if used else "nothing",
        code=_call(OURS, planned, precision=precision),
        rounds_to=frozenset(used),
    )


def _roundings_of(plan: Plan) -> list[str]:
    return sorted({str(bucket.compression) for bucket in plan.buckets if bucket.compression})


def _sparse(job: Job) -> Way:
    planned = job.sparse(SPARSE)
    return Way(
        planned=planned,
        trace=job.trace,
        workers=job.workers,
        change=Change.THINNING,
        changes=f"the largest {SPARSE.density:.1%} of gradients travel, the others wait",
        code=_call(OURS, planned, precision="sparse"),
    )


def _accumulated(job: Job, *, passes: int) -> Way:
    batch = passes * job.workers * job.trace.batch_size
    return Way(
        planned=job.exact,
        trace=job.trace,
        workers=job.workers,
        change=Change.BATCH,
        changes=f"a batch of {batch:,} samples, {passes} times as many",
        code=f"with model.no_sync(): loss.backward()  # {passes - 1} of {passes} times",
        accumulation=passes,
    )


def _on_workers(job: Job, *, factor: float) -> Way:
    workers = int(factor * job.workers)
    if workers < 1:
        raise RequestError("one worker cannot be halved")
    batch, before = (count * job.trace.batch_size for count in (workers, job.workers))
    return Way(
        planned=job.on(workers).exact,
        trace=job.trace,
        workers=workers,
        change=Change.BATCH,
        changes=f"a batch of {batch:,} samples, {batch / before:.3g} times as many",
        code=f"torchrun with {workers} process{'es' if workers > 1 else ''} in all",
    )


def _call(wrapper: str, planned: PricedPlan, **given: str) -> str:
    """Return code that calls the wrapper with only those arguments it cannot find by itself."""
    if planned.choice.argument is not None:
        given["collective"] = planned.choice.argument
    arguments = "".join(f', {name}="{value}"' for name, value in given.items())
    return f"{wrapper}(model{arguments})"


# Of ways that are equally fast and change as much, the first here is the least trouble.
WAYS: Mapping[str, Callable[[Job], Way]] = {
    "torch-ddp": _torch_default,
    "exact": _exact,
    "torch-ddp-tuned": _torch_best_cap,
    "both-passes": _both_passes,
    "rounded": partial(_rounded, precision="rounded", roundings=(None, *ROUNDED_TO)),
    "bf16": partial(_rounded, precision="bf16", roundings=("bf16",)),
    "int8": partial(_rounded, precision="int8", roundings=("int8",)),
    "sparse": _sparse,
    "accumulate:2": partial(_accumulated, passes=2),
    "accumulate:4": partial(_accumulated, passes=4),
    "accumulate:8": partial(_accumulated, passes=8),
    "half-the-workers": partial(_on_workers, factor=0.5),
    "twice-the-workers": partial(_on_workers, factor=2),
}
# These take the same batches on the same machines.
SAME_BATCH = ("both-passes", "rounded", "bf16", "int8", "sparse")

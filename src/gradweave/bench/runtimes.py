"""What one iteration is under each runtime, as ranks of a training benchmark run it.

No runtime updates weights: an accelerator does that in no time, and these cores would not.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.bench.buckets import bucket_bytes, check_buckets
from gradweave.bench.training import COMPUTE, SHARDED, TORCH, Case
from gradweave.comm.groups import same_ranks
from gradweave.comm.lanes import LANES
from gradweave.comm.small_messages import largest
from gradweave.measure.alignment import clock_offset_s
from gradweave.measure.spans import SpanRecorder, aligned_timelines, watch
from gradweave.plan import Plan
from gradweave.planning import bsp
from gradweave.runtime.bsp import LOOPS, ROOT
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.runtime.sharded import ShardedDataParallel
from gradweave.sparse.settings import settings_for
from gradweave.timeline import Timeline
from gradweave.vocabulary import parse_spec

BATCH = torch.zeros(1)
CPU = torch.device("cpu")


class Trainee:
    """A model whose gradients on rank r are P (r + 1), so that their mean is exact."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.clock_offset_s = clock_offset_s(group)
        # For all wrappers, one after the other: making one takes a while.
        self.own_groups = [same_ranks(group) for _ in range(LANES)]
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.bytes_of = {name: parameter.nbytes for parameter, name in self.names.items()}

    def iterate(
        self, forward: Callable[[torch.Tensor], torch.Tensor], recorder: SpanRecorder | None
    ) -> None:
        self.model.zero_grad()
        if recorder is not None:
            recorder.begin()
        loss = forward(BATCH)
        if recorder is not None:
            recorder.backward()
        loss.backward()  # type: ignore[no-untyped-call]
        if recorder is not None and forward is self.model:
            recorder.ready()

    @property
    def mean(self) -> float:
        return self.group.size() * (self.group.size() + 1) / 2

    def gradients_are(self, expected: float) -> bool:
        return self.on_all(*(_is_filled(p.grad, expected) for p in self.model.parameters()))

    def gradients_are_alike(self) -> bool:
        """On all ranks, and not zero."""
        return self.is_alike(
            sum(
                float(parameter.grad.double().sum())
                for parameter in self.model.parameters()
                if parameter.grad is not None
            )
        )

    def on_all(self, *holds: bool) -> bool:
        wrong = not all(holds)
        return largest(self.group, [float(wrong)], device=CPU) == [0.0]

    def is_alike(self, total: float) -> bool:
        most, negated_least = largest(self.group, [total, -total], device=CPU)
        return most == -negated_least != 0.0


class Running(NamedTuple):
    """One iteration of a case, to be called again and again, and how the last one went.

    All ranks must ask for ``timelines``, which are those of all of them or none, and for
    ``is_correct``.
    """

    step: Callable[[], None]
    timelines: Callable[[], list[Timeline]]
    is_correct: Callable[[], bool]


@contextmanager
def running(case: Case, trainee: Trainee, *, noting: bool = False) -> Iterator[Running]:
    """``noting``: with a timeline."""
    plan = case.plan
    if plan is None:
        assert case.runtime == COMPUTE
        yield _computing(trainee, noting=noting)
    elif parse_spec(case.runtime).name == SHARDED:
        yield _sharded(plan, trainee, noting=noting)
    elif parse_spec(case.runtime).name in LOOPS:
        with _looping(case.runtime, trainee) as loop:
            yield loop
    elif not plan.overlap:
        yield _after_backward(plan, trainee, noting=noting)
    elif case.runtime == TORCH or case.bucket_cap_mb is not None:
        with _torchs(plan, trainee, case.bucket_cap_mb, noting=noting) as torchs:
            yield torchs
    else:
        with _ours(plan, trainee, noting=noting) as ours:
            yield ours


def _recorder(trainee: Trainee) -> tuple[SpanRecorder, Callable[[], list[Timeline]]]:
    recorder = SpanRecorder(trainee.names)
    return recorder, partial(aligned_timelines, recorder, trainee.group, trainee.clock_offset_s)


def _computing(trainee: Trainee, *, noting: bool) -> Running:
    recorder, timelines = _recorder(trainee)
    own = trainee.group.size() * (trainee.group.rank() + 1)
    return Running(
        partial(trainee.iterate, trainee.model, recorder if noting else None),
        timelines,
        partial(trainee.gradients_are, own),
    )


def _after_backward(plan: Plan, trainee: Trainee, *, noting: bool) -> Running:
    recorder, timelines = _recorder(trainee)
    noted = recorder if noting else None

    def step() -> None:
        trainee.iterate(trainee.model, noted)
        _average(plan, trainee, noted)

    return Running(step, timelines, partial(trainee.gradients_are, trainee.mean))


def _average(plan: Plan, trainee: Trainee, recorder: SpanRecorder | None) -> None:
    """One message per bucket; a bucket is one tensor here."""
    parameters = {name: parameter for parameter, name in trainee.names.items()}
    works = []
    for bucket in plan.buckets:
        (name,) = bucket.tensors
        gradient = parameters[name].grad
        assert gradient is not None
        works.append(
            (trainee.group.allreduce([gradient.div_(trainee.group.size())]), parameters[name])
        )
    started_s = time.perf_counter()
    for work, parameter in works:
        work.wait()
        if recorder is not None:
            recorder.done(started_s, [parameter], parameter.nbytes)


@contextmanager
def _torchs(
    plan: Plan, trainee: Trainee, bucket_cap_mb: float | None, *, noting: bool
) -> Iterator[Running]:
    recorder, timelines = _recorder(trainee)
    ddp = TorchDDP(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        bucket_cap_mb=bucket_cap_mb,
    )
    if noting:
        watch(ddp, recorder)
    yield Running(
        partial(trainee.iterate, ddp, recorder if noting else None),
        timelines,
        partial(trainee.gradients_are, trainee.mean),
    )
    check_buckets(ddp, bucket_bytes(plan, trainee.bytes_of))


@contextmanager
def _ours(plan: Plan, trainee: Trainee, *, noting: bool) -> Iterator[Running]:
    compression = plan.buckets[0].compression
    settings = None if compression is None else settings_for(compression)
    ours = DistributedDataParallel(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        plan=plan,
        compression=settings,
        timeline=noting,
        make_group=iter(trainee.own_groups).__next__,
    )
    dense = partial(trainee.gradients_are, trainee.mean)
    yield Running(
        partial(trainee.iterate, ours, None),
        ours.timelines,
        dense if settings is None else trainee.gradients_are_alike,
    )
    check_buckets(ours, bucket_bytes(plan, trainee.bytes_of))


def _sharded(plan: Plan, trainee: Trainee, *, noting: bool) -> Running:
    wrapped = ShardedDataParallel(
        trainee.model,
        plan=plan,
        process_group=trainee.group,
        timeline=noting,
        make_group=iter(trainee.own_groups).__next__,
    )

    def step() -> None:
        wrapped.zero_grad()
        wrapped(BATCH).backward()
        wrapped.gather()

    def is_correct() -> bool:
        """Gradients have their mean, and what a rank writes into its shards comes to all."""
        wrapped.synchronise()
        averaged = (_is_filled(shard.grad, trainee.mean) for shard in wrapped.parameters())
        is_averaged = trainee.on_all(*averaged)
        with torch.no_grad():
            for shard in wrapped.parameters():
                shard.fill_(trainee.group.rank() + 1)
        wrapped.gather()
        wrapped.synchronise()
        total = sum(float(parameter.double().sum()) for parameter in trainee.model.parameters())
        is_gathered = trainee.on_all(*(bool(p.all()) for p in trainee.model.parameters()))
        return trainee.is_alike(total) and is_averaged and is_gathered

    return Running(step, wrapped.timelines, is_correct)


@contextmanager
def _looping(runtime: str, trainee: Trainee) -> Iterator[Running]:
    named = bsp.find_loop(runtime)
    groups = iter(trainee.own_groups)
    options = {"make_group": groups.__next__} if named.name == "bsp-overlap" else {}
    seen = _Seen(trainee.model)
    loop = LOOPS[named.name](
        trainee.model, seen, collective=named.collective, group=trainee.group, **options
    )

    def is_correct() -> bool:
        """Whoever updates has seen the mean, and all have what it wrote."""
        seen.expected = trainee.mean
        step()
        loop.synchronise()
        seen.expected = None
        has_seen = seen.is_correct or (named.updates_at_root and trainee.group.rank() != ROOT)
        written = (_is_filled(p, trainee.mean) for p in trainee.model.parameters())
        return trainee.on_all(has_seen, *written)

    def step() -> None:
        loop.step(lambda: trainee.model(BATCH))

    try:
        yield Running(step, list, is_correct)
    finally:
        loop.close()


class _Seen(torch.optim.Optimizer):
    """Updates nothing; when it is asked to, looks at gradients and writes what is expected."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.expected: float | None = None
        self.is_correct = False

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        del closure
        if self.expected is None:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.is_correct = all(_is_filled(p.grad, self.expected) for p in parameters)
        for parameter in parameters:
            parameter.fill_(self.expected)


def _is_filled(tensor: torch.Tensor | None, value: float) -> bool:
    return tensor is not None and bool(torch.all(tensor == value))

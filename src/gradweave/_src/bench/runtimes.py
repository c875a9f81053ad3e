"""What one iteration is under each runtime, as ranks of a training benchmark run it.

No runtime updates weights: an accelerator does that in no time, and these cores would not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from gradweave._src.bench.buckets import bucket_bytes, check_buckets
from gradweave._src.bench.peer_plans import family
from gradweave._src.bench.peers import PEERS, Runner
from gradweave._src.bench.trainee import BATCH, Running, Seen, Trainee, is_filled
from gradweave._src.bench.training import SHARDED, Case
from gradweave._src.compression import EXACT, ROUNDED, SPARSE
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.plan import Plan
from gradweave._src.planning import bsp
from gradweave._src.runtime.bsp import LOOPS, ROOT
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.sparse.settings import settings_for

# Rounded gradients may be off by this share: a few roundings to bf16, or to 8 bits.
ROUNDED_WITHIN = 0.02


@contextmanager
def running(case: Case, trainee: Trainee) -> Iterator[Running]:
    runner = _computing if case.plan is None else RUNTIMES.get(family(case.runtime), _planned)
    with runner(case, trainee) as run:
        yield run


@contextmanager
def _computing(case: Case, trainee: Trainee) -> Iterator[Running]:
    recorder = trainee.recorder()
    own = trainee.group.size() * (trainee.group.rank() + 1)
    yield Running(
        partial(trainee.iterate, trainee.model, recorder if case.noting else None),
        partial(trainee.timelines, recorder),
        partial(trainee.gradients_are, own),
    )


@contextmanager
def _planned(case: Case, trainee: Trainee) -> Iterator[Running]:
    """Run a plan by our wrapper, or after backward where the plan does not overlap."""
    if not case.planned.overlap:
        yield _after_backward(case, trainee)
        return
    with _ours(case, trainee) as ours:
        yield ours


def _after_backward(case: Case, trainee: Trainee) -> Running:
    recorder = trainee.recorder()
    noted = recorder if case.noting else None

    def step() -> None:
        trainee.iterate(trainee.model, noted)
        _average(case.planned, trainee, noted)

    return Running(
        step, partial(trainee.timelines, recorder), partial(trainee.gradients_are, trainee.mean)
    )


def _average(plan: Plan, trainee: Trainee, recorder: SpanRecorder | None) -> None:
    """Average gradients by one message for each bucket, which is one tensor here."""
    parameters = {name: parameter for parameter, name in trainee.names.items()}
    works = []
    for bucket in plan.buckets:
        (name,) = bucket.tensors
        gradient = parameters[name].grad
        assert gradient is not None
        works.append(
            (trainee.group.allreduce([gradient.div_(trainee.group.size())]), parameters[name])
        )
    began = None if recorder is None else recorder.mark()
    for work, parameter in works:
        work.wait()
        if recorder is not None and began is not None:
            recorder.done(began, [parameter], parameter.nbytes)


@contextmanager
def _ours(case: Case, trainee: Trainee) -> Iterator[Running]:
    plan = case.planned
    compressions = {bucket.compression for bucket in plan.buckets} - {None}
    thinned = next((one for one in compressions if one and one.rounding is None), None)
    is_mixed = thinned is not None and any(not bucket.is_sparse for bucket in plan.buckets)
    is_rounded = bool(compressions) and thinned is None
    ours = DistributedDataParallel(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        plan=plan,
        compression=None if thinned is None else settings_for(thinned),
        precision=ROUNDED if is_rounded else SPARSE if is_mixed else EXACT,
        timeline=case.noting,
        make_group=iter(trainee.own_groups).__next__,
    )
    within = ROUNDED_WITHIN if is_rounded else 0.0
    averaged = partial(trainee.gradients_are, trainee.mean, within=within)
    yield Running(
        partial(trainee.iterate, ours, None),
        ours.timelines,
        averaged if thinned is None else trainee.gradients_are_alike,
    )
    check_buckets(ours, bucket_bytes(plan, trainee.bytes_of))


@contextmanager
def _sharded(case: Case, trainee: Trainee) -> Iterator[Running]:
    wrapped = ShardedDataParallel(
        trainee.model,
        plan=case.planned,
        process_group=trainee.group,
        timeline=case.noting,
        make_group=iter(trainee.own_groups).__next__,
    )

    def step() -> None:
        wrapped.zero_grad()
        wrapped(BATCH).backward()
        wrapped.gather()

    def is_correct() -> bool:
        """Return whether gradients have their mean, and what ranks write to shards comes to all."""
        wrapped.synchronise()
        averaged = (is_filled(shard.grad, trainee.mean) for shard in wrapped.parameters())
        is_averaged = trainee.on_all(*averaged)
        with torch.no_grad():
            for shard in wrapped.parameters():
                shard.fill_(trainee.group.rank() + 1)
        wrapped.gather()
        wrapped.synchronise()
        parameters = list(trainee.model.parameters())
        total = sum(float(parameter.detach().double().sum()) for parameter in parameters)
        is_gathered = trainee.on_all(*(bool(parameter.all()) for parameter in parameters))
        return trainee.is_alike(total) and is_averaged and is_gathered

    yield Running(step, wrapped.timelines, is_correct)


@contextmanager
def _looping(case: Case, trainee: Trainee) -> Iterator[Running]:
    """Run one of the papers' loops, which note no timeline."""
    named = bsp.find_loop(case.runtime)
    groups = iter(trainee.own_groups)
    options = {"make_group": groups.__next__} if named.name == "bsp-overlap" else {}
    seen = Seen(trainee.model.parameters())
    loop = LOOPS[named.name](
        trainee.model, seen, collective=named.collective, group=trainee.group, **options
    )

    def is_correct() -> bool:
        """Return whether ranks that update have seen the mean, and all have what they wrote."""
        seen.expected = trainee.mean
        step()
        loop.synchronise()
        seen.expected = None
        has_seen = seen.is_correct or (named.updates_at_root and trainee.group.rank() != ROOT)
        written = (is_filled(p, trainee.mean) for p in trainee.model.parameters())
        return trainee.on_all(has_seen, *written)

    def step() -> None:
        loop.step(lambda: trainee.model(BATCH))

    try:
        yield Running(step, list, is_correct)
    finally:
        loop.close()


# How a case runs, by the name of its runtime; names that are not here are planners'.
RUNTIMES: Mapping[str, Runner] = {
    SHARDED: _sharded,
    **dict.fromkeys(LOOPS, _looping),
    **PEERS,
}

"""What each rank of benchmarks/regret.py runs: ``python -m …regret_job FILE``.

Every turn has a fresh model under a fresh wrapper; which runtime is first alternates from run to
run, so that a machine that drifts drifts for all of them.
"""

import gc
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.peer_plans import TUNED
from gradweave._src.bench.ranks import default_group
from gradweave._src.bench.regret import CACHED, RealWork, RegretQuestion, Turn
from gradweave._src.bench.trainee import BATCH
from gradweave._src.bench.training import (
    OURS,
    SWEEP_ITERATIONS,
    SWEEP_REPEATS,
    swept_caps_mb,
)
from gradweave._src.comm.small_messages import largest
from gradweave._src.results import StageBegin
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.trace import Trace
from gradweave._src.workloads.datasets import Batches, fashion_mnist_subset
from gradweave._src.workloads.models import MODELS
from gradweave._src.workloads.replay import Replay

WARMUP = 2  # steps of each bucket_cap_mb that is swept
DIGITS = 6  # of seconds, which keeps files small

TrainingStep = Callable[[int], None]


class Work(Protocol):
    """What is trained, and on what. All ranks must ask together whether it ``is_correct``."""

    def model(self) -> nn.Module: ...

    def step_of(self, wrapped: nn.Module) -> TrainingStep: ...

    def is_correct(self, model: nn.Module) -> bool: ...


class Replayed:
    """A replayed model whose gradients on rank r are P (r + 1), so that their mean is exact."""

    def __init__(self, trace: Trace, group: dist.ProcessGroup) -> None:
        self._trace, self._group = trace, group

    def model(self) -> nn.Module:
        gradient = self._group.size() * (self._group.rank() + 1.0)
        return Replay(self._trace, mode="waiting", gradient=gradient)

    def step_of(self, wrapped: nn.Module) -> TrainingStep:
        def step(number: int) -> None:
            del number
            wrapped.zero_grad()
            wrapped(BATCH).backward()

        return step

    def is_correct(self, model: nn.Module) -> bool:
        mean = self._group.size() * (self._group.size() + 1) / 2
        gradients = (parameter.grad for parameter in model.parameters())
        wrong = not all(g is not None and bool(torch.all(g == mean)) for g in gradients)
        return largest(self._group, [float(wrong)]) == [0.0]


class Real:
    """A real model, which begins with the same weights and batches in every turn."""

    def __init__(self, work: RealWork, group: dist.ProcessGroup) -> None:
        self._work, self._group = work, group
        self._images = fashion_mnist_subset(train=True)
        self._order = Batches(
            examples=len(self._images),
            batch_size=work.batch_size,
            world=group.size(),
            rank=group.rank(),
        )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self._work.model]()

    def step_of(self, wrapped: nn.Module) -> TrainingStep:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=self._work.learning_rate, momentum=0.9)

        def step(number: int) -> None:
            batch = self._images.take(self._order.indices(number))
            optimizer.zero_grad()
            cross_entropy(wrapped(batch.normalised()), batch.labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def is_correct(self, model: nn.Module) -> bool:
        total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
        most, negated_least = largest(self._group, [total, -total])
        return most == -negated_least


def best_cap_mb(work: Work, group: dist.ProcessGroup) -> float | None:
    """Return the best cap, as `gradweave bench training` sweeps for it."""
    caps = swept_caps_mb(sum(parameter.nbytes for parameter in work.model().parameters()))
    taken_s: dict[float | None, list[float]] = {cap: [] for cap in caps}
    for _ in range(SWEEP_REPEATS):
        for cap in caps:
            step = work.step_of(_torchs(work.model(), group, cap))
            ends_s = step_ends_s(step, WARMUP + SWEEP_ITERATIONS, group)
            taken_s[cap].append(median(b - a for a, b in pairwise(ends_s[WARMUP - 1 :])))
    return min(caps, key=lambda cap: median(taken_s[cap]))


def step_ends_s(
    step: TrainingStep,
    steps: int,
    group: dist.ProcessGroup,
    *,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return when each step ended on the slowest rank, in seconds since a barrier."""
    ends_s = []
    group.barrier().wait()
    began_s = time.perf_counter()
    for number in range(steps):
        step(number)
        ends_s.append(time.perf_counter() - began_s)
        after_step()
    return largest(group, ends_s)


def turn(
    runtime: str, work: Work, question: RegretQuestion, group: dist.ProcessGroup, cache: str | None
) -> Turn:
    gc.collect()  # takes half a second with torch's objects, so not in the middle of a turn
    model = work.model()
    group.barrier().wait()
    began_s = time.perf_counter()
    cap_mb = question.bucket_cap_mb if runtime == TUNED else None
    ours = _ours(model, group, cache) if runtime in {OURS, CACHED} else None
    wrapped = _torchs(model, group, cap_mb) if ours is None else ours
    (wrapping_s,) = largest(group, [time.perf_counter() - began_s])
    stages: list[str] = []

    def note_stage() -> None:
        if ours is not None:
            stages.append(str(ours.findings().stage))

    ends_s = step_ends_s(work.step_of(wrapped), question.steps, group, after_step=note_stage)
    found = None if ours is None else ours.findings()
    plan = None if found is None else found.plan
    predicted = None if found is None else found.predicted
    return Turn(
        runtime=runtime,
        step_ends_s=tuple(round(end_s, DIGITS) for end_s in ends_s),
        wrapping_s=round(wrapping_s, DIGITS),
        correct=work.is_correct(model),
        bucket_cap_mb=cap_mb,
        stages=tuple(
            StageBegin(stage, step)
            for step, (before, stage) in enumerate(pairwise(("", *stages)), start=1)
            if stage != before
        ),
        explanation=None if ours is None else ours.explain(),
        messages=None if plan is None else len(plan.buckets),
        predicted_s=None if predicted is None else predicted.iteration_s,
    )


def _torchs(model: nn.Module, group: dist.ProcessGroup, cap_mb: float | None) -> nn.Module:
    return TorchDDP(model, process_group=group, init_sync=False, bucket_cap_mb=cap_mb)


def _ours(model: nn.Module, group: dist.ProcessGroup, cache: str | None) -> DistributedDataParallel:
    # Without a folder there is no cache, even where the environment names one.
    return DistributedDataParallel(model, process_group=group, init_sync=False, cache=cache or "")


def turns(question: RegretQuestion, work: Work, group: dist.ProcessGroup) -> Iterator[Turn]:
    for run in range(question.runs):
        in_order = question.runtimes if run % 2 == 0 else tuple(reversed(question.runtimes))
        for runtime in in_order:
            # The folder is empty in the first run, so nothing is read there either.
            fills = runtime == OURS and run == 0 and CACHED in question.runtimes
            remembers = fills or runtime == CACHED
            yield turn(runtime, work, question, group, question.cache if remembers else None)


def answers(question: RegretQuestion, group: dist.ProcessGroup) -> Iterator[Turn]:
    work: Work
    if isinstance(question.work, RealWork):
        work = Real(question.work, group)
    else:
        work = Replayed(question.work.trace, group)
    _torchs(work.model(), group, None)  # imports what wrappers need
    if TUNED in question.runtimes and question.sweeps:
        question = replace(question, sweeps=False, bucket_cap_mb=best_cap_mb(work, group))
    return turns(question, work, group)


def main() -> None:
    question = asked(RegretQuestion)
    with default_group() as group:
        for one in answers(question, group):
            if group.rank() == 0:
                answer(one)


if __name__ == "__main__":
    main()

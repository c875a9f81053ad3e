"""What each rank of ``gradweave bench training`` runs: ``python -m …training_job FILE``.

Every repeat goes through all runtimes, each on a fresh wrapper around the same replayed model, so
that a machine that drifts drifts for all of them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave.bench.jobs import answer, asked
from gradweave.bench.ranks import default_group
from gradweave.bench.training import TORCH, Case, TrainingAnswer, TrainingQuestion
from gradweave.comm.agree import largest
from gradweave.measure.spans import SpanRecorder, watch
from gradweave.plan import Plan
from gradweave.runtime.buckets import bucket_bytes, bucket_caps_mb, check_buckets
from gradweave.timeline import Timeline
from gradweave.workloads.replay import Replay

TIMELINE_ITERATIONS = 5
BATCH = torch.zeros(1)


class Trainee:
    """A model, and what one iteration of it is under some runtime."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
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


@contextmanager
def running(
    case: Case, trainee: Trainee, recorder: SpanRecorder | None
) -> Iterator[Callable[[], None]]:
    """One iteration of a case, to be called again and again."""
    if case.plan is None:
        yield lambda: trainee.iterate(trainee.model, recorder)
    elif not case.plan.overlap:
        plan = case.plan

        def after_backward() -> None:
            trainee.iterate(trainee.model, recorder)
            _average(plan, trainee, recorder)

        yield after_backward
    else:
        ddp = _wrapped(case, case.plan, trainee)
        if recorder is not None:
            watch(ddp, recorder)
        yield lambda: trainee.iterate(ddp, recorder)
        check_buckets(ddp, bucket_bytes(case.plan, trainee.bytes_of))


def _wrapped(case: Case, plan: Plan, trainee: Trainee) -> DistributedDataParallel:
    """torch's own wrapper: as it comes, with a uniform cap, or with the plan's."""
    caps: dict[str, object] = {"bucket_cap_mb_list": bucket_caps_mb(plan, trainee.bytes_of)}
    if case.bucket_cap_mb is not None:
        caps = {"bucket_cap_mb": case.bucket_cap_mb}
    elif case.runtime == TORCH:
        caps = {}
    return DistributedDataParallel(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        **caps,  # type: ignore[arg-type]
    )


def _average(plan: Plan, trainee: Trainee, recorder: SpanRecorder | None) -> None:
    """After backward, one message per bucket; a bucket is one tensor here."""
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


def timed(case: Case, trainee: Trainee, question: TrainingQuestion) -> TrainingAnswer:
    taken_s = []
    with running(case, trainee, None) as step:
        for _ in range(question.warmup):
            step()
        correct = _is_correct(trainee, averaged=case.plan is not None)
        trainee.group.barrier().wait()
        for _ in range(question.iterations):
            started_s = time.perf_counter()
            step()
            taken_s.append(time.perf_counter() - started_s)
    slowest_s = largest(trainee.group, taken_s, device=torch.device("cpu"))
    return TrainingAnswer(runtime=case.runtime, iteration_s=median(slowest_s), correct=correct)


def timeline(case: Case, trainee: Trainee, question: TrainingQuestion) -> Timeline:
    """Of the iteration that took the median time."""
    recorder = SpanRecorder(trainee.names)
    timelines = []
    with running(case, trainee, recorder) as step:
        for number in range(question.warmup + TIMELINE_ITERATIONS):
            step()
            if number >= question.warmup:
                timelines.append(recorder.timeline())
    timelines.sort(key=lambda one: one.iteration_s)
    return timelines[len(timelines) // 2]


def _is_correct(trainee: Trainee, *, averaged: bool) -> bool:
    """Rank r's gradients are r + 1 everywhere, so their mean is known."""
    size, rank = trainee.group.size(), trainee.group.rank()
    expected = (size + 1) / 2 if averaged else rank + 1.0
    wrong = any(
        parameter.grad is None or not torch.all(parameter.grad == expected)
        for parameter in trainee.model.parameters()
    )
    (wrong_ranks,) = largest(trainee.group, [float(wrong)], device=torch.device("cpu"))
    return wrong_ranks == 0.0


def answers(question: TrainingQuestion, group: dist.ProcessGroup) -> Iterator[TrainingAnswer]:
    model = Replay(question.trace, mode=question.mode, gradient=group.rank() + 1.0)
    trainee = Trainee(model, group)
    for _ in range(question.repeats):
        for case in question.cases:
            yield timed(case, trainee, question)
    if question.with_timelines:
        for case in question.cases:
            yield TrainingAnswer(runtime=case.runtime, timeline=timeline(case, trainee, question))


def main() -> None:
    question = asked(TrainingQuestion)
    with default_group() as group:
        for one in answers(question, group):
            if group.rank() == 0:
                answer(one)


if __name__ == "__main__":
    main()

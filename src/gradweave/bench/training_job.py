"""What each rank of ``gradweave bench training`` runs: ``python -m …training_job FILE``.

Every repeat goes through all runtimes, each on a fresh wrapper around the same replayed model, so
that a machine that drifts drifts for all of them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.bench.jobs import answer, asked
from gradweave.bench.ranks import default_group
from gradweave.bench.training import COMPUTE, OURS, TORCH, Case, TrainingAnswer, TrainingQuestion
from gradweave.comm.agree import largest
from gradweave.comm.communicator import subgroups_of
from gradweave.errors import RequestError
from gradweave.measure.alignment import clock_offset_s
from gradweave.measure.spans import SpanRecorder, aligned_timelines, watch
from gradweave.plan import Plan
from gradweave.runs import Prediction
from gradweave.runtime.buckets import bucket_bytes, check_buckets
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.sparse.settings import GTopK, Sparse, TopK
from gradweave.timeline import Timeline
from gradweave.workloads.replay import Replay

TIMELINE_ITERATIONS = 5
BATCH = torch.zeros(1)


class Trainee:
    """A model, and what one iteration of it is under some runtime."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        own_group = subgroups_of(group)(list(range(group.size())))
        assert own_group is not None
        self.clock_offset_s = clock_offset_s(group)
        self.own_group = own_group  # one for all wrappers: making one takes a while
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


class Running(NamedTuple):
    """One iteration of a case, to be called again and again, and how the last one went.

    ``timelines`` are those of all ranks, and all must ask for them.
    """

    step: Callable[[], None]
    timelines: Callable[[], list[Timeline]]


@contextmanager
def running(case: Case, trainee: Trainee, *, noting: bool = False) -> Iterator[Running]:
    """``noting``: with a timeline."""
    recorder = SpanRecorder(trainee.names)
    noted = recorder if noting else None
    timelines = partial(aligned_timelines, recorder, trainee.group, trainee.clock_offset_s)
    plan = case.plan
    if plan is None:
        yield Running(lambda: trainee.iterate(trainee.model, noted), timelines)
    elif not plan.overlap:

        def after_backward() -> None:
            trainee.iterate(trainee.model, noted)
            _average(plan, trainee, noted)

        yield Running(after_backward, timelines)
    elif case.runtime == TORCH or case.bucket_cap_mb is not None:
        ddp = TorchDDP(
            trainee.model,
            process_group=trainee.group,
            init_sync=False,
            bucket_cap_mb=case.bucket_cap_mb,
        )
        if noting:
            watch(ddp, recorder)
        yield Running(lambda: trainee.iterate(ddp, noted), timelines)
        check_buckets(ddp, bucket_bytes(plan, trainee.bytes_of))
    else:
        ours = DistributedDataParallel(
            trainee.model,
            process_group=trainee.group,
            init_sync=False,
            plan=plan,
            compression=_settings(plan),
            timeline=noting,
            make_group=lambda: trainee.own_group,
        )
        yield Running(lambda: trainee.iterate(ours, None), ours.timelines)
        check_buckets(ours, bucket_bytes(plan, trainee.bytes_of))


def _settings(plan: Plan) -> Sparse | None:
    compression = plan.buckets[0].compression
    if compression is None:
        return None
    return (TopK if compression.method == "topk" else GTopK)(density=compression.density)


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


def found_by_itself(trainee: Trainee) -> Prediction:
    """What our wrapper settles on, and what it then expects."""
    ddp = DistributedDataParallel(trainee.model, process_group=trainee.group, init_sync=False)
    while (found := ddp.findings()).stage != "settled":
        trainee.iterate(ddp, None)
    if found.plan is None or found.predicted is None:
        raise RequestError(ddp.explain())
    return Prediction(runtime=OURS, plan=found.plan, timeline=found.predicted)


def timed(case: Case, trainee: Trainee, question: TrainingQuestion) -> TrainingAnswer:
    taken_s = []
    with running(case, trainee, noting=case.noting) as run:
        for _ in range(question.warmup):
            run.step()
        correct = _is_correct(case, trainee)
        trainee.group.barrier().wait()
        for _ in range(question.iterations):
            started_s = time.perf_counter()
            run.step()
            taken_s.append(time.perf_counter() - started_s)
    slowest_s = largest(trainee.group, taken_s, device=torch.device("cpu"))
    return TrainingAnswer(runtime=case.runtime, iteration_s=median(slowest_s), correct=correct)


def timelines(case: Case, trainee: Trainee, question: TrainingQuestion) -> list[Timeline]:
    """Of all ranks, in the iteration that took rank 0 the median time."""
    found = []
    with running(case, trainee, noting=True) as run:
        for number in range(question.warmup + TIMELINE_ITERATIONS):
            run.step()
            if number >= question.warmup:
                found.append(run.timelines())
    found.sort(key=lambda one: one[0].iteration_s)
    return found[len(found) // 2]


def _is_correct(case: Case, trainee: Trainee) -> bool:
    """Rank r's gradients are P (r + 1), so that their mean is exact; sparse ones must be alike."""
    size, rank = trainee.group.size(), trainee.group.rank()
    if case.plan is not None and case.plan.buckets[0].compression is not None:
        return _is_alike(trainee)
    expected = size * (rank + 1) if case.runtime == COMPUTE else size * (size + 1) / 2
    wrong = any(
        parameter.grad is None or not torch.all(parameter.grad == expected)
        for parameter in trainee.model.parameters()
    )
    (wrong_ranks,) = largest(trainee.group, [float(wrong)], device=torch.device("cpu"))
    return wrong_ranks == 0.0


def _is_alike(trainee: Trainee) -> bool:
    total = sum(
        float(parameter.grad.double().sum())
        for parameter in trainee.model.parameters()
        if parameter.grad is not None
    )
    most, negated_least = largest(trainee.group, [total, -total], device=torch.device("cpu"))
    return most == -negated_least != 0.0


def answers(question: TrainingQuestion, group: dist.ProcessGroup) -> Iterator[TrainingAnswer]:
    model = Replay(question.trace, mode=question.mode, gradient=group.size() * (group.rank() + 1.0))
    trainee = Trainee(model, group)
    cases = list(question.cases)
    for number, case in enumerate(cases):
        if case.runtime == OURS:
            prediction = found_by_itself(trainee)
            cases[number] = replace(case, plan=prediction.plan)
            yield TrainingAnswer(runtime=OURS, prediction=prediction)
    for _ in range(question.repeats):
        for case in cases:
            yield timed(case, trainee, question)
    if question.with_timelines:
        for case in cases:
            found = timelines(case, trainee, question)
            yield TrainingAnswer(runtime=case.runtime, timelines=tuple(found))


def main() -> None:
    question = asked(TrainingQuestion)
    with default_group() as group:
        for one in answers(question, group):
            if group.rank() == 0:
                answer(one)


if __name__ == "__main__":
    main()

"""What each rank of a real training runs: ``python -m …real_training_job FILE``."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.peer_plans import TORCH
from gradweave._src.bench.ranks import default_group
from gradweave._src.bench.real_training import (
    STEPS_OF_A_TURN,
    Besides,
    RealAnswer,
    RealQuestion,
)
from gradweave._src.bench.regret import SETTLED
from gradweave._src.bench.training import COMPUTE, OURS, SHARDED
from gradweave._src.comm.small_messages import largest
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.spans import SpanRecorder, aligned_timelines, watch
from gradweave._src.plan import Plan
from gradweave._src.planning.bsp import find_loop
from gradweave._src.results import LossSeries, StageBegin
from gradweave._src.runs import Prediction
from gradweave._src.runtime.bsp import LOOPS
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.session.findings import Findings
from gradweave._src.timeline import Timeline
from gradweave._src.workloads.datasets import Batches, Images, fashion_mnist_subset
from gradweave._src.workloads.models import MODELS

# Few steps, for people wait.
RECORD_STEPS = TRIAL_STEPS = 2
WARMUP_STEPS, NOTED_STEPS, COMPUTED_STEPS = 2, 5, 12

ComputeLoss = Callable[[nn.Module], torch.Tensor]
TrainingStep = Callable[[ComputeLoss], torch.Tensor]


class Trained(NamedTuple):
    """One step of a training, and what its wrapper has found out; None where nobody plans."""

    step: TrainingStep
    model: nn.Module
    findings: Callable[[], Findings | None] = lambda: None

    def may_end(self) -> bool:
        found = self.findings()
        return found is None or found.stage == SETTLED


def new_model(question: RealQuestion) -> nn.Module:
    """Make the model with the same weights every time."""
    torch.manual_seed(0)
    return MODELS[question.model]().to(_dtype(question))


def optimizer_of(module: nn.Module, question: RealQuestion) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=question.learning_rate, momentum=0.9)


@contextmanager
def training(runtime: str, question: RealQuestion, group: dist.ProcessGroup) -> Iterator[Trained]:
    model = new_model(question)

    def step_of(wrapped: nn.Module) -> TrainingStep:
        optimizer = optimizer_of(wrapped, question)

        def step(compute_loss: ComputeLoss) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute_loss(wrapped)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    if runtime == COMPUTE:
        yield Trained(step_of(model), model)
    elif runtime == TORCH:
        yield Trained(step_of(TorchDDP(model, process_group=group)), model)
    elif runtime == OURS:
        ours = DistributedDataParallel(
            model, process_group=group, record_steps=RECORD_STEPS, trial_steps=TRIAL_STEPS
        )
        yield Trained(step_of(ours), model, ours.findings)
    elif runtime == SHARDED:
        sharded = ShardedDataParallel(
            model, process_group=group, record_steps=RECORD_STEPS, trial_steps=TRIAL_STEPS
        )
        yield Trained(step_of(sharded), model, sharded.findings)
    else:
        named = find_loop(runtime)
        loop = LOOPS[named.name](
            model, optimizer_of(model, question), collective=named.collective, group=group
        )
        try:
            yield Trained(lambda compute_loss: loop.step(lambda: compute_loss(model)), model)
        finally:
            loop.close()


class Data:
    """What a rank trains on, step by step."""

    def __init__(self, question: RealQuestion, group: dist.ProcessGroup, images: Images) -> None:
        self._images, self._dtype = images, _dtype(question)
        self._order = Batches(
            examples=len(images),
            batch_size=question.batch_size,
            world=group.size(),
            rank=group.rank(),
        )

    def loss(self, step: int) -> ComputeLoss:
        batch = self._images.take(self._order.indices(step))
        inputs = batch.normalised().to(self._dtype)
        return lambda model: cross_entropy(model(inputs), batch.labels)


def losses(
    runtime: str, trained: Trained, group: dist.ProcessGroup, *, data: Data, steps: int, more: int
) -> RealAnswer:
    """Train for ``steps`` at least, until nobody plans any more, and ``more`` after that."""
    found: list[float] = []
    wall_s: list[float] = []
    stages: list[str] = []
    group.barrier().wait()
    started_s = time.perf_counter()
    while len(found) < steps or not trained.may_end() or more > 0:
        more -= trained.may_end()
        found.append(float(trained.step(data.loss(len(found)))))
        wall_s.append(time.perf_counter() - started_s)
        if (so_far := trained.findings()) is not None:
            stages.append(so_far.stage)
        if group.rank() == 0:
            answer(RealAnswer())
    is_alike = runtime not in {TORCH, OURS} or _is_alike(trained.model, group)
    means = torch.tensor(found, dtype=torch.float64)
    group.allreduce([means]).wait()
    series = LossSeries(
        label=runtime,
        steps=tuple(range(len(found))),
        losses=tuple((means / group.size()).tolist()),
        wall_s=tuple(wall_s),
        stages=tuple(
            StageBegin(stage, step)
            for step, (before, stage) in enumerate(pairwise(("", *stages)))
            if stage != before
        ),
    )
    return RealAnswer(series=series, correct=is_alike)


def in_turns(
    trainings: dict[str, Trained], group: dist.ProcessGroup, *, data: Data, turns: int
) -> dict[str, list[float]]:
    """Return what a step took under each runtime, the median of each of its turns.

    So what slows this machine down for a while slows all runtimes down.
    """
    steps_s: dict[str, list[float]] = {runtime: [] for runtime in trainings}
    runtimes = list(trainings)
    for turn in range(turns):
        by = turn % len(runtimes)
        for runtime in runtimes[by:] + runtimes[:by]:
            taken_s = []
            group.barrier().wait()
            for number in range(WARMUP_STEPS + STEPS_OF_A_TURN):
                started_s = time.perf_counter()
                trainings[runtime].step(data.loss(number))
                taken_s.append(time.perf_counter() - started_s)
            steps_s[runtime].append(median(taken_s[WARMUP_STEPS:]))
    return steps_s


def _is_alike(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks have the same weights."""
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    most, negated_least = largest(group, [total, -total])
    return most == -negated_least


def besides(
    found: Findings, question: RealQuestion, group: dist.ProcessGroup, data: Data
) -> Besides | None:
    """Return what a run's folder holds besides losses; None where there is no plan to tell of."""
    trace, network, plan, predicted = found.trace, found.network, found.plan, found.predicted
    if trace is None or network is None or plan is None or predicted is None:
        return None
    return Besides(
        trace=trace,
        network=network,
        found=Prediction(runtime=OURS, plan=plan, timeline=predicted),
        compute_s=computing_s(question, group, data),
        timelines={
            TORCH: timelines_of_torch(question, group, data),
            OURS: timelines_of_ours(plan, question, group, data),
        },
    )


def computing_s(question: RealQuestion, group: dist.ProcessGroup, data: Data) -> float:
    """Return what a step takes without any messages, on the slowest rank, while all compute."""
    taken_s = []
    with training(COMPUTE, question, group) as trained:
        for step in range(WARMUP_STEPS + COMPUTED_STEPS):
            group.barrier().wait()
            started_s = time.perf_counter()
            trained.step(data.loss(step))
            taken_s.append(time.perf_counter() - started_s)
    return median(largest(group, taken_s)[WARMUP_STEPS:])


def timelines_of_torch(
    question: RealQuestion, group: dist.ProcessGroup, data: Data
) -> tuple[Timeline, ...]:
    model = new_model(question)
    recorder = SpanRecorder({parameter: name for name, parameter in model.named_parameters()})
    ddp = TorchDDP(model, process_group=group)
    watch(ddp, recorder)
    offset_s = clock_offset_s(group)
    optimizer = optimizer_of(ddp, question)

    def step(compute_loss: ComputeLoss) -> list[Timeline]:
        optimizer.zero_grad()
        recorder.begin()
        loss = compute_loss(ddp)
        recorder.backward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return aligned_timelines(recorder, group, offset_s)

    return _median_of([step(data.loss(number)) for number in range(WARMUP_STEPS + NOTED_STEPS)])


def timelines_of_ours(
    plan: Plan, question: RealQuestion, group: dist.ProcessGroup, data: Data
) -> tuple[Timeline, ...]:
    ours = DistributedDataParallel(
        new_model(question), process_group=group, plan=plan, timeline=True
    )
    optimizer = optimizer_of(ours, question)

    def step(compute_loss: ComputeLoss) -> list[Timeline]:
        optimizer.zero_grad()
        compute_loss(ours).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return ours.timelines()

    return _median_of([step(data.loss(number)) for number in range(WARMUP_STEPS + NOTED_STEPS)])


def _median_of(noted: list[list[Timeline]]) -> tuple[Timeline, ...]:
    """Return the times of all ranks in the step that took rank 0 the median time."""
    ordered = sorted(noted[WARMUP_STEPS:], key=lambda ranks: ranks[0].iteration_s)
    return tuple(ordered[len(ordered) // 2])


def _dtype(question: RealQuestion) -> torch.dtype:
    return torch.float64 if question.is_double else torch.float32


def answers(question: RealQuestion, group: dist.ProcessGroup) -> Iterator[RealAnswer]:
    # Runtimes that plan need most steps, so they come first, and the others take as many.
    in_order = sorted(question.runtimes, key=lambda runtime: runtime not in {OURS, SHARDED})
    data = Data(question, group, fashion_mnist_subset(train=True))
    steps, more = question.least_steps, question.steps_when_settled
    of_ours: Findings | None = None
    kept: dict[str, Trained] = {}
    with ExitStack() as until_all_have_trained:
        for runtime in in_order:
            with ExitStack() as until_it_has:
                trained = until_it_has.enter_context(training(runtime, question, group))
                one = losses(runtime, trained, group, data=data, steps=steps, more=more)
                of_ours = trained.findings() if runtime == OURS else of_ours
                if question.turns > 0:
                    kept[runtime] = trained
                    until_all_have_trained.callback(until_it_has.pop_all().close)
                del trained  # or it would live beside the next one
            assert one.series is not None
            steps = max(steps, len(one.series.steps))
            yield one
        if question.turns > 0:
            yield RealAnswer(turns_s=in_turns(kept, group, data=data, turns=question.turns))
            kept.clear()
    if question.for_folder and of_ours is not None:
        yield RealAnswer(besides=besides(of_ours, question, group, data))


def main() -> None:
    question = asked(RealQuestion)
    with default_group() as group:
        for one in answers(question, group):
            if group.rank() == 0:
                answer(one)


if __name__ == "__main__":
    main()

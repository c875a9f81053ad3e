"""What each rank of a real training runs: ``python -m …real_training_job FILE``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.bench.jobs import answer, asked
from gradweave.bench.peer_plans import TORCH
from gradweave.bench.ranks import default_group
from gradweave.bench.real_training import RealAnswer, RealQuestion
from gradweave.bench.training import OURS, SHARDED
from gradweave.planning.bsp import find_loop
from gradweave.results import LossSeries
from gradweave.runtime.bsp import LOOPS
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.runtime.sharded import ShardedDataParallel
from gradweave.workloads.datasets import Batches, Images, fashion_mnist_subset
from gradweave.workloads.models import MODELS

# Few, for people wait.
RECORD_STEPS = TRIAL_STEPS = 2

ComputeLoss = Callable[[nn.Module], torch.Tensor]
TrainingStep = Callable[[ComputeLoss], torch.Tensor]


@contextmanager
def training(
    runtime: str, question: RealQuestion, group: dist.ProcessGroup
) -> Iterator[tuple[TrainingStep, Callable[[], bool]]]:
    """One step of it, and whether it may end."""
    torch.manual_seed(0)
    model = MODELS[question.model]().to(_dtype(question))

    def optimizer_of(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), lr=question.learning_rate, momentum=0.9)

    def step_of(wrapped: nn.Module) -> TrainingStep:
        optimizer = optimizer_of(wrapped)

        def step(compute_loss: ComputeLoss) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute_loss(wrapped)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    if runtime == TORCH:
        yield step_of(TorchDDP(model, process_group=group)), lambda: True
    elif runtime == OURS:
        ours = DistributedDataParallel(
            model, process_group=group, record_steps=RECORD_STEPS, trial_steps=TRIAL_STEPS
        )
        yield step_of(ours), lambda: ours.findings().stage == "settled"
    elif runtime == SHARDED:
        sharded = ShardedDataParallel(
            model, process_group=group, record_steps=RECORD_STEPS, trial_steps=TRIAL_STEPS
        )
        yield step_of(sharded), lambda: sharded.findings().stage == "settled"
    else:
        named = find_loop(runtime)
        loop = LOOPS[named.name](
            model, optimizer_of(model), collective=named.collective, group=group
        )
        try:
            yield lambda compute_loss: loop.step(lambda: compute_loss(model)), lambda: True
        finally:
            loop.close()


def losses(
    runtime: str,
    question: RealQuestion,
    group: dist.ProcessGroup,
    *,
    images: Images,
    least_steps: int,
) -> LossSeries:
    order = Batches(
        examples=len(images),
        batch_size=question.batch_size,
        world=group.size(),
        rank=group.rank(),
    )
    found: list[float] = []
    wall_s: list[float] = []
    with training(runtime, question, group) as (step, may_end):
        group.barrier().wait()
        started_s = time.perf_counter()
        when_settled = question.steps_when_settled
        while len(found) < least_steps or not may_end() or when_settled > 0:
            when_settled -= may_end()
            batch = images.take(order.indices(len(found)))
            inputs = batch.normalised().to(_dtype(question))
            loss = step(lambda model: cross_entropy(model(inputs), batch.labels))  # noqa: B023
            found.append(float(loss))
            wall_s.append(time.perf_counter() - started_s)
            if group.rank() == 0:
                answer(RealAnswer())
    means = torch.tensor(found, dtype=torch.float64)
    group.allreduce([means]).wait()
    return LossSeries(
        label=runtime,
        steps=tuple(range(len(found))),
        losses=tuple((means / group.size()).tolist()),
        wall_s=tuple(wall_s),
    )


def _dtype(question: RealQuestion) -> torch.dtype:
    return torch.float64 if question.is_double else torch.float32


def main() -> None:
    question = asked(RealQuestion)
    # Whoever needs most steps comes first, so that the others take as many.
    in_order = sorted(question.runtimes, key=lambda runtime: runtime not in {OURS, SHARDED})
    images = fashion_mnist_subset(train=True)
    steps = question.least_steps
    with default_group() as group:
        for runtime in in_order:
            series = losses(runtime, question, group, images=images, least_steps=steps)
            steps = max(steps, len(series.steps))
            if group.rank() == 0:
                answer(RealAnswer(series=series))


if __name__ == "__main__":
    main()

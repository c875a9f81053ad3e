"""What each rank of a real training runs: ``python -m …real_training_job FILE``."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.bench.jobs import answer, asked
from gradweave.bench.ranks import default_group
from gradweave.bench.real_training import RealAnswer, RealOutcome, RealQuestion
from gradweave.results import LossSeries
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.workloads.datasets import Batches, fashion_mnist_subset
from gradweave.workloads.models import MODELS

# Few, for people wait.
RECORD_STEPS = TRIAL_STEPS = 2


class Training:
    """The same model, data and steps, whoever wraps the model."""

    def __init__(self, question: RealQuestion, group: dist.ProcessGroup) -> None:
        self._question, self._group = question, group
        self._images = fashion_mnist_subset(train=True)
        self._batches = Batches(
            examples=len(self._images),
            batch_size=question.batch_size,
            world=group.size(),
            rank=group.rank(),
        )

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return MODELS[self._question.model]()

    def run(self, label: str, wrapped: TorchDDP, is_over: Callable[[int], bool]) -> LossSeries:
        """The loss of each step, as mean over the ranks."""
        optimizer = torch.optim.SGD(
            wrapped.parameters(), lr=self._question.learning_rate, momentum=0.9
        )
        losses: list[float] = []
        wall_s: list[float] = []
        started_s = time.perf_counter()
        while not is_over(len(losses)):
            batch = self._images.take(self._batches.indices(len(losses)))
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(batch.normalised()), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            wall_s.append(time.perf_counter() - started_s)
            if self._group.rank() == 0:
                answer(RealAnswer())
        means = torch.tensor(losses, dtype=torch.float64)
        self._group.allreduce([means]).wait()
        return LossSeries(
            label=label,
            steps=tuple(range(len(losses))),
            losses=tuple((means / self._group.size()).tolist()),
            wall_s=tuple(wall_s),
        )


def trained(question: RealQuestion, group: dist.ProcessGroup) -> RealOutcome:
    training = Training(question, group)
    ours = DistributedDataParallel(
        training.model(),
        process_group=group,
        record_steps=RECORD_STEPS,
        trial_steps=TRIAL_STEPS,
    )
    with_ours = training.run(
        "Gradweave's wrapper",
        ours,
        lambda steps: steps >= question.least_steps and ours.findings().stage == "settled",
    )
    stock = TorchDDP(training.model(), process_group=group)
    with_torchs = training.run(
        "torch's wrapper", stock, lambda steps: steps >= len(with_ours.steps)
    )
    return RealOutcome(torchs=with_torchs, ours=with_ours, explained=ours.explain())


def main() -> None:
    question = asked(RealQuestion)
    with default_group() as group:
        found = trained(question, group)
        if group.rank() == 0:
            answer(RealAnswer(outcome=found))


if __name__ == "__main__":
    main()

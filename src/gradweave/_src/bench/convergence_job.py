"""What each rank of the convergence experiments runs: ``python -m …convergence_job FILE``."""

import time
from dataclasses import dataclass
from functools import lru_cache
from math import cos, isfinite, pi
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_

from gradweave._src.bench.convergence import (
    ConvergenceAnswer,
    ConvergenceQuestion,
    Data,
    Epoch,
    Outcome,
    Training,
)
from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.ranks import default_group
from gradweave._src.bench.wires import wrapped
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK
from gradweave._src.sparse.warmup import PAPER_WARMUP, Densities
from gradweave._src.workloads.datasets import (
    Batches,
    Images,
    flipped_and_cropped,
    load_cifar10,
    load_idx,
    load_text,
)
from gradweave._src.workloads.models import MODELS

MOMENTUM = 0.9
CROPPED_BY = 4  # pixels, of CIFAR-10's images
WINDOW = 32  # characters
TRAINED_SHARE = 0.9  # of a text; the rest is for testing
TESTED_AT_ONCE = 250

Batch = tuple[torch.Tensor, torch.Tensor]  # what goes into a model, and what is to come out


class ImageData:
    def __init__(self, train: Images, test: Images, *, augmented: bool) -> None:
        self._train, self._test, self._augmented = train, test, augmented
        self.examples, self.tests = len(train), len(test)

    def batch(self, indices: torch.Tensor, *, seed: int, epoch: int) -> Batch:
        if self._augmented:
            images = flipped_and_cropped(
                self._train, indices, seed=seed, epoch=epoch, padding=CROPPED_BY
            )
        else:
            images = self._train.take(indices)
        return images.normalised(), images.labels

    def test(self, indices: torch.Tensor) -> Batch:
        images = self._test.take(indices)
        return images.normalised(), images.labels


class TextData:
    def __init__(self, path: Path) -> None:
        inputs, targets = load_text(path).windows(WINDOW)
        self.examples = int(TRAINED_SHARE * len(inputs))
        self.tests = len(inputs) - self.examples
        self._inputs, self._targets = inputs, targets

    def batch(self, indices: torch.Tensor, *, seed: int, epoch: int) -> Batch:
        del seed, epoch
        return self._inputs[indices], self._targets[indices]

    def test(self, indices: torch.Tensor) -> Batch:
        return self._inputs[self.examples + indices], self._targets[self.examples + indices]


@lru_cache
def load(name: Data, folder: Path) -> ImageData | TextData:
    if name == "shakespeare":
        return TextData(folder / "tinyshakespeare" / "input.txt")
    if name == "cifar10":
        files = folder / "cifar10-subset"
        return ImageData(
            load_cifar10(files / "train_10000.bin"),
            load_cifar10(files / "test_2000.bin"),
            augmented=True,
        )
    files = folder / "fashion-mnist"
    train, test = (
        load_idx(files / f"{split}-images-idx3-ubyte.gz", files / f"{split}-labels-idx1-ubyte.gz")
        for split in ("train", "t10k")
    )
    return ImageData(train, test, augmented=False)


def centre(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return the centre of images, which were moved at random, and so a random part of each."""
    margin = (images.shape[-1] - size) // 2
    return images[..., margin : margin + size, margin : margin + size]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of learning by step: they rise during warm-up, then follow a cosine to zero."""

    warmup_steps: int
    steps: int

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return (1 + cos(pi * (step - self.warmup_steps) / (self.steps - self.warmup_steps))) / 2


class Learner:
    """A wrapped model, its optimizer, and what both are fed with."""

    def __init__(
        self, training: Training, data: ImageData | TextData, group: dist.ProcessGroup
    ) -> None:
        self._training, self._data, self._group = training, data, group
        self._batches = Batches(
            examples=data.examples,
            batch_size=training.batch_size,
            world=group.size(),
            rank=group.rank(),
            seed=training.seed,
        )
        self.steps_per_epoch = self._batches.steps_per_epoch
        self._warmup_steps = round(training.warmup_epochs * self.steps_per_epoch)
        torch.manual_seed(training.seed)
        self.model = MODELS[training.model](width=training.width)
        if training.data != "shakespeare":
            # Convolutions take a tenth less time.
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._wrapped = self._wrap()
        self._optimizer = self._make_optimizer()
        rates = Rates(self._warmup_steps, training.epochs * self.steps_per_epoch)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rates.factor)

    def _wrap(self) -> TorchDDP:
        training = self._training
        if training.wire is not None:
            return wrapped(self.model, training.wire, self._group)
        if training.density is None:
            return TorchDDP(self.model, process_group=self._group)
        compression = GTopK(
            density=Densities(
                warmup=tuple(max(density, training.density) for density in PAPER_WARMUP),
                final=training.density,
                steps_each=max(1, self._warmup_steps // len(PAPER_WARMUP)),
            ),
            momentum=None if training.momentum == "optimizer's" else MOMENTUM,
            masking=training.momentum == "masked",
            clip_norm=training.clip_norm,
            exchange=training.exchange,
            whole_model=True,
        )
        return DistributedDataParallel(
            self.model, process_group=self._group, compression=compression
        )

    def _make_optimizer(self) -> torch.optim.SGD:
        """Return SGD without momentum where that is corrected before selection.

        Momentum makes steps 1 / (1 - momentum) times longer, so weight decay is then that much
        larger.
        """
        training = self._training
        corrected = training.density is not None and training.momentum != "optimizer's"
        return torch.optim.SGD(
            self.model.parameters(),
            lr=training.learning_rate,
            momentum=0.0 if corrected else MOMENTUM,
            weight_decay=training.weight_decay / ((1 - MOMENTUM) if corrected else 1),
        )

    def epoch(self, number: int) -> float:
        """Train for an epoch, and return the mean loss over its steps and all ranks."""
        self._wrapped.train()  # type: ignore[no-untyped-call]
        total = torch.zeros((), dtype=torch.float64)
        first = number * self.steps_per_epoch
        for step in range(first, first + self.steps_per_epoch):
            inputs, targets = self._data.batch(
                self._batches.indices(step), seed=self._training.seed, epoch=number
            )
            if self._training.crop is not None:
                inputs = centre(inputs, self._training.crop)
            self._optimizer.zero_grad()
            loss = cross_entropy(self._wrapped(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if self._training.density is None and self._training.clip_norm is not None:
                clip_grad_norm_(self.model.parameters(), self._training.clip_norm)
            self._optimizer.step()
            self._scheduler.step()
            total += loss.detach()
        self._group.allreduce([total]).wait()
        return total.item() / self.steps_per_epoch / self._group.size()

    @torch.no_grad()
    def tested(self) -> tuple[float, float]:
        """Return loss and accuracy on the test data, of which each rank takes a share."""
        for buffer in self.model.buffers():
            self._group.broadcast(buffer, 0).wait()
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # of losses, right answers, answers
        mine = torch.arange(self._group.rank(), self._data.tests, self._group.size())
        for indices in torch.split(mine, TESTED_AT_ONCE):
            inputs, targets = self._data.test(indices)
            scores = self.model(inputs)
            right = scores.argmax(1).eq(targets).sum()
            loss = cross_entropy(scores, targets, reduction="sum")
            sums += torch.stack([loss.double(), right.double(), torch.tensor(targets.numel())])
        self._group.allreduce([sums]).wait()
        loss_sum, right_sum, answers = sums.tolist()
        return loss_sum / answers, right_sum / answers

    def has_same_weights(self) -> bool:
        mine = torch.cat([weights.detach().flatten() for weights in self.model.parameters()])
        firsts = mine.clone()
        self._group.broadcast(firsts, 0).wait()
        differing = torch.tensor([not torch.equal(mine, firsts)], dtype=torch.int32)
        self._group.allreduce([differing]).wait()
        return not differing.item()


def trained(training: Training, folder: Path, group: dist.ProcessGroup) -> Outcome:
    learner = Learner(training, load(training.data, folder), group)
    epochs: list[Epoch] = []
    started_s = time.perf_counter()
    for number in range(training.epochs):
        train_loss = learner.epoch(number)
        test_loss, accuracy = learner.tested()
        if not isfinite(train_loss + test_loss):
            break
        epochs.append(
            Epoch(
                step=(number + 1) * learner.steps_per_epoch,
                train_loss=train_loss,
                test_loss=test_loss,
                accuracy=accuracy,
                wall_s=time.perf_counter() - started_s,
            )
        )
        if group.rank() == 0:
            answer(ConvergenceAnswer(epoch=epochs[-1]))
    return Outcome(
        training=training,
        parameters=sum(parameter.numel() for parameter in learner.model.parameters()),
        epochs=epochs,
        same_weights=learner.has_same_weights(),
    )


def main() -> None:
    question = asked(ConvergenceQuestion)
    with default_group() as group:
        for training in question.trainings:
            outcome = trained(training, Path(question.folder), group)
            if group.rank() == 0:
                answer(ConvergenceAnswer(outcome=outcome))


if __name__ == "__main__":
    main()

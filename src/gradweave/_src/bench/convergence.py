"""Trainings to the end on real data, dense and sparsified, to compare what they have learnt."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.compression import ExchangeName
from gradweave._src.lab import Cluster
from gradweave._src.results import LossSeries

Data = Literal["cifar10", "fashion-mnist", "shakespeare"]
# Momentum is corrected before selection, with or without restarting where elements were applied, or
# it is that of torch's own optimizer, after the exchange.
Momentum = Literal["masked", "corrected", "optimizer's"]


class Training(Struct, frozen=True, kw_only=True):
    """One training: dense by torch's own wrapper, or rounded or with gTop-k by ours.

    The learning rate rises linearly while densities fall, then follows a cosine to zero; it is the
    same with and without sparsification.
    """

    experiment: str
    model: str  # a name of gradweave._src.workloads.models
    width: int
    data: Data
    epochs: int
    batch_size: int  # of each worker
    learning_rate: float
    weight_decay: float = 0.0
    crop: int | None = None  # train on random squares of so many pixels; tests see whole images
    clip_norm: float | None = None  # of the mean gradient
    warmup_epochs: float  # for all densities of the warm-up together
    density: float | None = None  # after warm-up; None: dense
    momentum: Momentum = "masked"  # where it is not dense
    exchange: ExchangeName = "gtopk"  # where it is not dense
    wire: str | None = None  # how dense gradients travel, by a name of bench.wires; None: as is
    seed: int = 0

    @property
    def label(self) -> str:
        if self.density is None:
            return self.wire or "dense"
        by = "" if self.exchange == "gtopk" else f" by {self.exchange}"
        return f"gTop-k {self.density:g}{by}, {self.momentum} momentum"


class Epoch(Struct, frozen=True, kw_only=True):
    """What had been learnt after an epoch; accuracy is of images or of characters."""

    step: int
    train_loss: float  # mean over the epoch's steps and the ranks
    test_loss: float
    accuracy: float
    wall_s: float  # since training began


class Outcome(Struct, frozen=True, kw_only=True):
    training: Training
    parameters: int
    epochs: list[Epoch]  # as long as losses were finite
    same_weights: bool  # every rank ended with the same bits

    @property
    def diverged(self) -> bool:
        return len(self.epochs) < self.training.epochs

    def losses(self) -> LossSeries:
        return LossSeries(
            label=f"{self.training.label}, seed {self.training.seed}",
            steps=tuple(epoch.step for epoch in self.epochs),
            losses=tuple(epoch.train_loss for epoch in self.epochs),
            wall_s=tuple(epoch.wall_s for epoch in self.epochs),
        )


class ConvergenceQuestion(Struct, frozen=True, kw_only=True):
    folder: str  # of the data sets
    trainings: list[Training]


class ConvergenceAnswer(Struct, frozen=True, kw_only=True):
    """What rank 0 answers: an epoch of a training is over, or all of it."""

    epoch: Epoch | None = None
    outcome: Outcome | None = None


def train_to_the_end(
    cluster: Cluster,
    trainings: Sequence[Training],
    *,
    folder: Path,
    on_epoch: Callable[[Epoch], None],
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Run trainings one after the other; what comes of them is told at once, in another thread."""

    def take(text: str) -> None:
        answer = msgspec.json.decode(text, type=ConvergenceAnswer)
        if answer.epoch is not None:
            on_epoch(answer.epoch)
        if answer.outcome is not None:
            on_outcome(answer.outcome)

    question = ConvergenceQuestion(folder=str(folder), trainings=list(trainings))
    ask(cluster, "gradweave._src.bench.convergence_job", question, on_answer=take)

"""Training a real model on real images on an emulated cluster, under one runtime after another."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave.bench.jobs import ask
from gradweave.lab import Cluster
from gradweave.results import LossSeries


class RealQuestion(Struct, frozen=True, kw_only=True):
    """All runtimes take the same steps: as many as those need that plan by themselves."""

    runtimes: tuple[str, ...]
    model: str  # a name of gradweave.workloads.models
    least_steps: int
    batch_size: int  # of each worker
    learning_rate: float
    is_double: bool = False  # in float64, where roundings are too small to grow into losses
    steps_when_settled: int = 0  # and so many more


class RealAnswer(Struct, frozen=True, kw_only=True):
    """A step was taken, or one runtime's training is over."""

    series: LossSeries | None = None


def train_for_real(
    cluster: Cluster, question: RealQuestion, *, advance: Callable[[], None] = lambda: None
) -> dict[str, LossSeries]:
    """Losses, as means over the ranks, by runtime."""
    found: list[LossSeries] = []

    def take(text: str) -> None:
        series = msgspec.json.decode(text, type=RealAnswer).series
        if series is None:
            advance()
        else:
            found.append(series)

    ask(cluster, "gradweave.bench.real_training_job", question, on_answer=take)
    return {series.label: series for series in found}

"""Training a real model on real data on an emulated cluster, under torch's wrapper and ours."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave.bench.jobs import ask
from gradweave.lab import Cluster
from gradweave.results import LossSeries


class RealQuestion(Struct, frozen=True, kw_only=True):
    model: str  # a name of gradweave.workloads.models
    least_steps: int
    batch_size: int  # of each worker
    learning_rate: float


class RealAnswer(Struct, frozen=True, kw_only=True):
    """A step was taken, or the training is over."""

    outcome: "RealOutcome | None" = None


class RealOutcome(Struct, frozen=True, kw_only=True):
    """Losses are means over the ranks."""

    torchs: LossSeries
    ours: LossSeries
    explained: str


def train_for_real(
    cluster: Cluster, question: RealQuestion, *, advance: Callable[[], None] = lambda: None
) -> RealOutcome:
    """Both take the same steps on the same data; ours until its plan is settled at least."""
    found: list[RealOutcome] = []

    def take(text: str) -> None:
        outcome = msgspec.json.decode(text, type=RealAnswer).outcome
        if outcome is None:
            advance()
        else:
            found.append(outcome)

    ask(cluster, "gradweave.bench.real_training_job", question, on_answer=take)
    return found[0]

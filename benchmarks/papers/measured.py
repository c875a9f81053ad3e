"""What was measured on emulated clusters, from benchmarks/results: the latest of each kind."""

from functools import cache
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

RESULTS = Path(__file__).resolve().parents[1] / "results"


class Row(Struct, frozen=True):
    """A runtime's iterations in one experiment of training.py."""

    trace: str
    runtime: str
    nodes: int
    iteration_s: float
    predicted_s: float
    compute_s: float
    exposed_s: float
    messages: int
    repeats_s: tuple[float, ...] = ()  # of iterations, in turn with the other runtimes
    ranks_per_node: int | None = 1


class Experiment(Struct, frozen=True):
    experiment: str
    parameter_scale: float
    results: list[Row]
    selection_s: float | None = None  # of the model's largest gradients

    @property
    def rows(self) -> dict[str, Row]:
        """The runtimes by their names."""
        return {row.runtime: row for row in self.results}


class Experiments(Struct, frozen=True):
    measured: list[Experiment]


class Timing(Struct, frozen=True):
    """One operation by one algorithm in collectives.py."""

    op: str
    algorithm: str
    ranks: int
    bytes: int
    median_s: float


class OfCluster(Struct, frozen=True):
    experiment: str
    timings: list[Timing]


class Collectives(Struct, frozen=True):
    timings: list[OfCluster]


class Series(Struct, frozen=True):
    """The losses of one runtime in real_training.py."""

    label: str
    losses: list[float]


class RealTraining(Struct, frozen=True):
    experiment: str
    series: list[Series]
    settled_s: dict[str, list[float]]  # by runtime, what its last steps took in each round

    def step_s(self, runtime: str) -> float:
        """Return the median of the rounds."""
        return median(self.settled_s[runtime])

    def difference(self, runtime: str, other: str) -> float:
        """Return how far the losses of two runtimes are apart at most."""
        losses = {series.label: series.losses for series in self.series}
        return max(abs(a - b) for a, b in zip(losses[runtime], losses[other], strict=True))


def page_of(kind: str) -> str:
    """Return a link from docs to the page with these numbers and the commits they are of."""
    return f"[{kind}](../benchmarks/results/{_latest(kind).stem}.md)"


@cache
def training(experiment: str) -> tuple[Experiment, ...]:
    found = msgspec.json.decode(_latest("training").read_bytes(), type=Experiments)
    return tuple(one for one in found.measured if one.experiment == experiment)


@cache
def collectives(experiment: str) -> tuple[Timing, ...]:
    found = msgspec.json.decode(_latest("collectives").read_bytes(), type=Collectives)
    return tuple(
        timing for one in found.timings if one.experiment == experiment for timing in one.timings
    )


@cache
def real_training(experiment: str) -> RealTraining:
    found = msgspec.json.decode(_latest("real_training").read_bytes(), type=list[RealTraining])
    return next(one for one in found if one.experiment == experiment)


class Broadcasts(Struct, frozen=True):
    """One run of broadcasts.py, by the names of algorithms."""

    nbytes: int
    seconds: dict[str, float]


@cache
def broadcasts() -> tuple[Broadcasts, ...]:
    found = msgspec.json.decode(_latest("broadcasts").read_bytes(), type=list[Broadcasts])
    return tuple(found)


class Learnt(Struct, frozen=True):
    """How a training stood after an epoch."""

    test_loss: float
    accuracy: float


class Setting(Struct, frozen=True):
    """What a training of convergence.py was."""

    experiment: str
    epochs: int
    density: float | None
    momentum: str = "masked"
    exchange: str = "gtopk"
    seed: int = 0


class Training(Struct, frozen=True):
    training: Setting
    epochs: list[Learnt]

    @property
    def end(self) -> Learnt | None:
        """What it had learnt in the end; None where losses were no longer finite before."""
        is_whole = len(self.epochs) == self.training.epochs
        return self.epochs[-1] if is_whole else None


class Trainings(Struct, frozen=True):
    outcomes: list[Training]


@cache
def convergence(experiment: str) -> tuple[Training, ...]:
    found = msgspec.json.decode(_latest("convergence").read_bytes(), type=Trainings)
    return tuple(one for one in found.outcomes if one.training.experiment == experiment)


def _latest(kind: str) -> Path:
    return max(RESULTS.glob(f"{kind}_2cores_*.json"))

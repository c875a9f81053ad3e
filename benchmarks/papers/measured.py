"""What was measured on emulated clusters, from benchmarks/results: the latest of each kind."""

from functools import cache
from itertools import pairwise
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


class Experiment(Struct, frozen=True):
    experiment: str
    parameter_scale: float
    results: list[Row]


class Training(Struct, frozen=True):
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
    """The steps of one runtime in real_training.py."""

    label: str
    wall_s: list[float]

    @property
    def step_s(self) -> float:
        """The median of the last twenty."""
        ends = self.wall_s[-21:]
        return median(after - before for before, after in pairwise(ends))


class RealTraining(Struct, frozen=True):
    experiment: str
    series: list[Series]


def page_of(kind: str) -> str:
    """A link from docs to the page that has these numbers and the commits they are of."""
    return f"[{kind}](../benchmarks/results/{_latest(kind).stem}.md)"


@cache
def training(experiment: str) -> tuple[Experiment, ...]:
    found = msgspec.json.decode(_latest("training").read_bytes(), type=Training)
    return tuple(one for one in found.measured if one.experiment == experiment)


@cache
def collectives(experiment: str) -> tuple[Timing, ...]:
    found = msgspec.json.decode(_latest("collectives").read_bytes(), type=Collectives)
    return tuple(
        timing for one in found.timings if one.experiment == experiment for timing in one.timings
    )


@cache
def real_training(experiment: str) -> dict[str, Series]:
    found = msgspec.json.decode(_latest("real_training").read_bytes(), type=list[RealTraining])
    return {
        series.label: series
        for one in found
        if one.experiment == experiment
        for series in one.series
    }


def _latest(kind: str) -> Path:
    return max(RESULTS.glob(f"{kind}_2cores_*.json"))

"""What an experiment measured, beside what was predicted."""

from collections.abc import Iterable
from itertools import pairwise
from math import isfinite

from msgspec import Struct

from gradweave._src.checks import (
    LARGEST,
    first_twice,
    require_not_negative,
    require_positive,
    require_text,
)
from gradweave._src.errors import RequestError

OPTIONAL_TIMES = ("predicted_s", "compute_s", "exposed_s")


class Result(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One runtime on one cluster; docs/measuring.md says how each number is measured.

    A training may not know all that a benchmark knows: what is None.

    Attributes:
        trace: the name of the trace, which is the model's.
        runtime: the name of the runtime; of a training, what it was wrapped with.
        workers: how many ranks there were.
        nodes: how many hosts they were on.
        ranks_per_node: how many were on each; None also where hosts have different numbers of them.
        rate: of each host's link, as it was asked for.
        iteration_s: seconds of an iteration, the median of the repeats.
        predicted_s: seconds that it was predicted to take.
        prediction_error: of the predicted time, as a share of the measured.
        compute_s: seconds of the same without communication.
        exposed_s: seconds in which nothing is computed.
        messages: how many are sent in an iteration.
        speedup: over torch-ddp; None where that did not run.
        repeats_s: the seconds of each repeat.
        correct: whether gradients were what they must be; None where nobody looked.
        bucket_cap_mb: torch's own argument, where the best was found by trying and is not its
            default.
    """

    trace: str
    runtime: str
    workers: int
    nodes: int | None
    ranks_per_node: int | None
    rate: str | None
    iteration_s: float
    predicted_s: float | None
    prediction_error: float | None
    compute_s: float | None
    exposed_s: float | None
    messages: int
    speedup: float | None
    repeats_s: tuple[float, ...]
    correct: bool | None
    bucket_cap_mb: float | None

    def __post_init__(self) -> None:
        require_text(self, "trace", "runtime")
        require_positive(self, "workers")
        require_not_negative(self, "iteration_s", "messages")
        known = (name for name in OPTIONAL_TIMES if getattr(self, name) is not None)
        require_not_negative(self, *known)
        if self.nodes is not None and self.ranks_per_node is not None:
            product = self.nodes * self.ranks_per_node
            if product != self.workers:
                raise RequestError(
                    f"workers must be nodes times ranks_per_node, {product}, got {self.workers}"
                )

    @property
    def efficiency(self) -> float | None:
        """The share of the time in which something is computed."""
        return None if self.compute_s is None else self.compute_s / self.iteration_s


class Results(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run measured, a row for each runtime; `results.json` in a run's folder.

    Attributes:
        command: what was run, for people.
        rows: one for each runtime.
    """

    command: str
    rows: tuple[Result, ...]


class StageBegin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stage of planning begins.

    Attributes:
        stage: its name.
        step: its first step, counted as the steps beside it are.
    """

    stage: str
    step: int


# What stages of planning are to people; all that are not here are planning.
PHASE_OF_STAGE = {"trying": "trying", "settled": "settled"}
PLANNING = "planning"


def planning_phases(stages: Iterable[StageBegin]) -> tuple[StageBegin, ...]:
    """Return stages as people tell them apart: planning, trying, settled."""
    named = [StageBegin(PHASE_OF_STAGE.get(one.stage, PLANNING), one.step) for one in stages]
    before = [None, *(one.stage for one in named)]
    return tuple(one for one, last in zip(named, before, strict=False) if one.stage != last)


class LossSeries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the loss fell in one training.

    Attributes:
        label: what the training is called, among others.
        steps: after which steps the loss is known, counted from 0.
        losses: the loss after each of them.
        wall_s: how many seconds after training began that was.
        stages: the stages of planning, as it went on; none where nobody planned.
    """

    label: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    wall_s: tuple[float, ...]
    stages: tuple[StageBegin, ...] = ()

    def __post_init__(self) -> None:
        require_text(self, "label")
        if not len(self.steps) == len(self.losses) == len(self.wall_s) > 0:
            raise RequestError(
                f"{self.label!r}: steps, losses and wall_s must be equally many and at least one, "
                f"got {len(self.steps)}, {len(self.losses)} and {len(self.wall_s)}"
            )
        if not all(isfinite(number) for number in (*self.losses, *self.wall_s)):
            raise RequestError(
                f"{self.label!r}: losses and wall_s must be finite; leave others out"
            )
        if any(after <= before for before, after in pairwise((-1, *self.steps, LARGEST))):
            raise RequestError(f"{self.label!r}: steps must increase, from 0 or more")
        if any(after < before for before, after in pairwise((0.0, *self.wall_s, LARGEST))):
            raise RequestError(f"{self.label!r}: wall_s must not decrease, from 0 or more")
        begins = [begin.step for begin in self.stages]
        if any(after <= before for before, after in pairwise((-1, *begins, LARGEST))):
            raise RequestError(f"{self.label!r}: stages must begin one after the other, from 0 on")

    @property
    def phases(self) -> tuple[StageBegin, ...]:
        """The stages as people tell them apart: planning, trying, settled."""
        return planning_phases(self.stages)


class Losses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trainings to compare; `losses.json` in a run's folder.

    Attributes:
        series: one for each training, in the order in which to show them.
    """

    series: tuple[LossSeries, ...]

    def __post_init__(self) -> None:
        labels = [series.label for series in self.series]
        if not labels:
            raise RequestError("series must not be empty")
        if (twice := first_twice(labels)) is not None:
            raise RequestError(f"series: {twice!r} stands twice; labels must be unique")

"""Ranks that are slow on purpose: are they found, in which phase, and what would a step gain?

One training goes through many cases. In each of them one rank takes longer for one phase, or its
link is slower, or nothing is wrong; what stands next to a case with a fault is without one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.lab import Cluster
from gradweave._src.phases import Phase
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import parse_rate

JOB = "gradweave._src.bench.stragglers_job"


class Fault(Struct, frozen=True, kw_only=True):
    """A phase of one rank, or each byte on its link, takes longer by this share."""

    rank: int
    phase: Phase
    share: float


class StragglersQuestion(Struct, frozen=True, kw_only=True):
    trace: Trace
    input_s: float  # between two passes
    settling_steps: int  # at the beginning of a case, which do not count
    steps: int
    cases: tuple[Fault | None, ...]
    folder: str  # where a file with a case's number appears when links are as that case has them


class Watched(Struct, frozen=True, kw_only=True):
    """One case: what a step took, and what the wrapper said."""

    number: int
    fault: Fault | None
    step_s: float  # the median of its steps, on the slowest rank
    found: tuple[SlowRank, ...]

    @property
    def is_right(self) -> bool:
        """Whether the worst finding names the fault, or none was found where there is none."""
        if self.fault is None or not self.found:
            return self.fault is None and not self.found
        worst = self.found[0]
        return (worst.rank, worst.phase) == (self.fault.rank, self.fault.phase)


class Healed(Struct, frozen=True, kw_only=True):
    """A case with a fault that was found, beside the same training without it."""

    watched: Watched
    step_s: float  # without the fault: the mean of the cases before and after

    @property
    def prediction_error(self) -> float:
        """How far the predicted step without the fault is off, as a share of the step it takes."""
        return self.watched.found[0].step_without_s / self.step_s - 1


def healed(cases: Sequence[Watched]) -> list[Healed]:
    """Return each fault that was found, with the mean step of neighbours that have no fault."""
    return [
        Healed(watched=case, step_s=(before.step_s + after.step_s) / 2)
        for before, case, after in zip(cases, cases[1:], cases[2:], strict=False)
        if case.fault is not None and case.is_right
        if before.fault is None and after.fault is None
    ]


def watch_ranks(
    cluster: Cluster,
    question: StragglersQuestion,
    *,
    rate: str,
    on_case: Callable[[Watched], None],
) -> None:
    """Go through the cases on a cluster of one rank for each node, whose links have this rate.

    ``on_case`` sees each case as it ends, in another thread.
    """
    slowed: set[int] = set()  # nodes whose links are slowed

    def prepare(number: int) -> None:
        while slowed:
            cluster.set_rate(slowed.pop(), rate)
        fault = question.cases[number]
        if fault is not None and fault.phase == "network":
            cluster.set_rate(fault.rank, f"{round(parse_rate(rate) / (1 + fault.share))}bit")
            slowed.add(fault.rank)
        Path(question.folder, str(number)).touch()

    def take(text: str) -> None:
        watched = msgspec.json.decode(text, type=Watched)
        on_case(watched)
        if watched.number + 1 < len(question.cases):
            prepare(watched.number + 1)

    prepare(0)
    ask(cluster, JOB, question, on_answer=take)

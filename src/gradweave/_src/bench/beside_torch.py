"""Our wrapper beside torch's, and computing alone: what anybody wants to know first.

Nothing has to be known of the network, so nothing is calibrated before. What our wrapper predicts
rests on what it has found out by itself while it trained.
"""

from collections.abc import Callable
from statistics import median

from msgspec import Struct

from gradweave._src.bench.peer_plans import TORCH
from gradweave._src.bench.training import (
    COMPUTE,
    OURS,
    Case,
    Settings,
    TrainingAnswer,
    TrainingQuestion,
    ask_for_times,
    on_cluster,
    times_s,
)
from gradweave._src.costs import FREE
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster
from gradweave._src.plan import merge
from gradweave._src.planning import find_planner
from gradweave._src.runs import Prediction
from gradweave._src.trace import Trace

RUNTIMES = (COMPUTE, TORCH, OURS)


class BesideTorch(Struct, frozen=True, kw_only=True):
    """What an iteration takes on the slowest rank, a median for each repeat, in turns."""

    compute_s: tuple[float, ...]
    torch_s: tuple[float, ...]
    ours_s: tuple[float, ...]
    found: Prediction  # by our wrapper while it trained
    explanation: str  # what it says about that

    @property
    def speedup(self) -> float:
        return median(self.torch_s) / median(self.ours_s)


def steps(settings: Settings) -> int:
    """Return how many times ``train_beside_torch`` will advance."""
    return 1 + settings.repeats * len(RUNTIMES)


def train_beside_torch(
    cluster: Cluster,
    trace: Trace,
    settings: Settings,
    *,
    advance: Callable[[], None] = lambda: None,
) -> BesideTorch:
    """Time computing alone, torch's wrapper and ours in turn, as often as ``settings`` say."""
    torchs = merge(trace, find_planner("ddp")(trace, FREE), planner="ddp", collective="native")
    question = TrainingQuestion(
        trace=trace,
        mode=settings.mode,
        cases=(Case(runtime=COMPUTE), Case(runtime=TORCH, plan=torchs), Case(runtime=OURS)),
        warmup=settings.warmup,
        iterations=settings.iterations,
        repeats=settings.repeats,
        with_timelines=False,
    )
    answers = ask_for_times(on_cluster(cluster), question, advance)
    planned = next(one for one in answers if one.prediction is not None)
    assert planned.prediction is not None
    _check(answers)
    compute_s, torch_s, ours_s = (tuple(times_s(answers, name)) for name in RUNTIMES)
    return BesideTorch(
        compute_s=compute_s,
        torch_s=torch_s,
        ours_s=ours_s,
        found=planned.prediction,
        explanation=planned.explanation or "",
    )


def _check(answers: list[TrainingAnswer]) -> None:
    wrong = {one.runtime for one in answers if one.correct is False}
    if wrong:
        raise LabError(f"gradients were wrong under {', '.join(sorted(wrong))}; run it again")

"""What planning costs on its way to a plan: every step of a training, from the first one on.

Runtimes take turns; what is computed from their steps is defined in docs/measuring.md.
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.bench.peer_plans import TORCH, TUNED
from gradweave._src.bench.training import OURS
from gradweave._src.lab import Cluster
from gradweave._src.results import StageBegin
from gradweave._src.trace import Trace

JOB = "gradweave._src.bench.regret_job"

CACHED = "gradweave-cached"  # our wrapper with the plan of a training before
# In the first run they come in this order, for CACHED needs what OURS has found.
RUNTIMES = (TORCH, TUNED, OURS, CACHED)

SETTLED = "settled"
# torch rebuilds its buckets after the first step, and no runtime is up to speed in these.
FIRST_STEPS = 5
STRETCH_STEPS = 20


class ReplayedWork(Struct, frozen=True, kw_only=True, tag="replayed"):
    """A replayed trace without optimizer: accelerators take no time for it, these cores would."""

    trace: Trace


class RealWork(Struct, frozen=True, kw_only=True, tag="real"):
    """A real model, trained on real images by SGD with momentum."""

    model: str  # a name of gradweave._src.workloads.models
    batch_size: int  # of each worker
    learning_rate: float


class RegretQuestion(Struct, frozen=True, kw_only=True):
    work: ReplayedWork | RealWork
    runtimes: tuple[str, ...]
    steps: int
    runs: int
    cache: str  # an empty folder, which the first run of ours fills
    sweeps: bool = True  # whether the cap of TUNED is searched for
    bucket_cap_mb: float | None = None  # if not searched for; None: torch's own were best


class Turn(Struct, frozen=True, kw_only=True):
    """All steps of one runtime in one run."""

    runtime: str
    step_ends_s: tuple[float, ...]  # since the barrier before the first, on the slowest rank
    wrapping_s: float  # making the wrapper, before that barrier
    correct: bool  # gradients were the mean over the ranks, or weights are alike on them
    bucket_cap_mb: float | None = None  # where it was swept
    # Of our wrapper alone:
    stages: tuple[StageBegin, ...] = ()  # counted from 1
    explanation: str | None = None  # at the end
    messages: int | None = None
    predicted_s: float | None = None

    @property
    def steps(self) -> int:
        return len(self.step_ends_s)

    @property
    def total_s(self) -> float:
        return self.step_ends_s[-1]

    @property
    def steps_s(self) -> list[float]:
        return [end_s - begin_s for begin_s, end_s in pairwise((0.0, *self.step_ends_s))]

    @property
    def planning_steps(self) -> int | None:
        """The steps before it settled for good, or all if it did not; None where nobody plans."""
        if not self.stages:
            return None
        last = self.stages[-1]
        return last.step - 1 if last.stage == SETTLED else self.steps

    @property
    def settled_s(self) -> float | None:
        """The median step after planning was over; None where no step came after that."""
        unsettled = FIRST_STEPS if self.planning_steps is None else self.planning_steps
        settled_s = self.steps_s[unsettled:]
        return median(settled_s) if settled_s else None

    @property
    def regret_steps(self) -> float | None:
        """How many settled steps more would have fitted into the time that all steps took."""
        settled_s = self.settled_s
        return None if settled_s is None else self.total_s / settled_s - self.steps


def break_even_step(ours: Turn, torchs: Turn) -> int | None:
    """Return the first step, after a few, at whose end ours has taken less time in all."""
    pairs = zip(ours.step_ends_s, torchs.step_ends_s, strict=True)
    ahead = (step for step, (our_s, their_s) in enumerate(pairs, start=1) if our_s < their_s)
    return next((step for step in ahead if step > FIRST_STEPS), None)


def ratio_of_first(ours: Turn, torchs: Turn, *, steps: int) -> float:
    """Return our time over torch's for the first ``steps``, or for all where there are fewer."""
    last = min(steps, ours.steps) - 1
    return ours.step_ends_s[last] / torchs.step_ends_s[last]


def worst_stretch(ours: Turn, torchs: Turn) -> float | None:
    """Return how slow our slowest stretch with planning in it is, over torch's median steps."""
    torch_s = torchs.settled_s
    begins = min(ours.planning_steps or 0, ours.steps - STRETCH_STEPS + 1)
    if torch_s is None or begins < 1:
        return None
    ends_s = (0.0, *ours.step_ends_s)
    slowest_s = max(ends_s[first + STRETCH_STEPS] - ends_s[first] for first in range(begins))
    return slowest_s / (STRETCH_STEPS * torch_s)


def train_in_turn(
    cluster: Cluster, question: RegretQuestion, *, on_turn: Callable[[Turn], None]
) -> None:
    """Train run after run; ``on_turn`` sees each turn as it ends, in another thread."""

    def take(text: str) -> None:
        on_turn(msgspec.json.decode(text, type=Turn))

    ask(cluster, JOB, question, on_answer=take)

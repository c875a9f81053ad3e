"""What a planning session is to find a plan for."""

from collections.abc import Callable

from msgspec import Struct

from gradweave._src.compression import Compression
from gradweave._src.planning.baselines import TORCH_BYTES, TORCH_FIRST_BYTES
from gradweave._src.vocabulary import Passes

# What training begins with, as every text calls it.
TORCHS_BUCKETS = "torch's own buckets"
# A step beyond every warm-up.
LAST_STEP = 1 << 60
# The first step after a change allocates.
SETTLING_STEPS = 1
# So many steps pass until all ranks have been told what came of the timed ones.
AGREEING_STEPS = 2
# Planning may take so many visits of plans, and so many steps for recording and learning before.
MOST_VISITS_OF_PLANS, STEPS_BEFORE_VISITS = 10, 25


class PlanningTask(Struct, frozen=True, kw_only=True):
    """What a session is to find a plan for; the same on every rank."""

    workers: int
    planner: str = "optimal"
    passes: Passes = "backward"
    collective: str = "native"  # by which messages travel without a plan
    rivals: tuple[str, ...] = ()  # other collectives that plans may use
    roundings: tuple[str, ...] = ()  # and ways that round gradients, such as ring+bf16
    record_steps: int = 5
    trial_steps: int = 4  # 0: the prediction is trusted
    replan_when: float | None = None
    watches_briefly: bool = False  # only the first steps tell whether to plan again
    baseline: str = TORCHS_BUCKETS  # what every plan is compared with, in words
    # The cap of the first bucket, and of the others.
    baseline_caps_bytes: tuple[int, int] = (TORCH_FIRST_BYTES, TORCH_BYTES)
    keeps_declared_order: bool = False  # whether torch's buckets follow the order of declaration
    compression_at: Callable[[int], Compression] | None = None  # by training step
    mixes_dense: bool = False  # some buckets may stay dense beside sparse ones
    is_whole_model: bool = False  # which travels as one sparse message, whatever that costs

    @property
    def visit_steps(self) -> int:
        """How many steps are timed each time that a plan runs."""
        return max(1, self.trial_steps)

    @property
    def steps_per_visit(self) -> int:
        return SETTLING_STEPS + self.visit_steps + AGREEING_STEPS

    @property
    def most_steps(self) -> int:
        """The steps after which planning ends with the best plan so far."""
        visits = MOST_VISITS_OF_PLANS * self.steps_per_visit
        return STEPS_BEFORE_VISITS + self.record_steps + visits

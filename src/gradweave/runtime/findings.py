"""What planning has found out: measured, tried, chosen."""

from msgspec import Struct

from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.runtime.candidates import Candidate
from gradweave.timeline import Timeline
from gradweave.trace import Trace


class Trial(Struct, frozen=True, kw_only=True):
    """A candidate in real training steps; times of the slowest rank."""

    candidate: Candidate
    step_s: float


class Findings(Struct, kw_only=True):
    """What the course has found out so far."""

    trace: Trace | None = None
    network: Network | None = None
    trials: list[Trial] = []
    plan: Plan | None = None
    predicted: Timeline | None = None
    stage: str = "not begun"
    note: str | None = None  # why there is no plan, or why there is another than was asked for

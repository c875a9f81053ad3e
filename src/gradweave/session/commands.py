"""What a planning session asks for, and what it is told.

Commands and replies are values. A reply is the same on every rank, so that sessions that have been
told the same ask for the same; whoever carries out commands sees to that.
"""

from enum import StrEnum

from msgspec import Struct

from gradweave.compression import Compression
from gradweave.costs import Line
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.session.candidates import Candidate
from gradweave.trace import Trace


class SimpleBuckets(StrEnum):
    """Buckets that need no plan."""

    ONE = "everything in one bucket"
    ORIGINAL = "what the wrapper began with"


class Install(Struct, frozen=True, tag=True):
    """Send these buckets from the next pass on. There is no reply.

    ``order`` is that in which gradients come, where what the wrapper began with follows it.
    """

    buckets: Plan | SimpleBuckets
    order: tuple[str, ...] = ()


class Record(Struct, frozen=True, tag=True):
    """Note in at least so many steps when gradients are ready, and measure messages beside them."""

    least_steps: int


class FindCandidates(Struct, frozen=True, tag=True):
    """Compute the plans that are worth trying, with this compression."""

    trace: Trace
    network: Network
    compression: Compression | None


class TimeSteps(Struct, frozen=True, tag=True):
    """Say how long a step takes on the slowest rank, after some that do not count."""

    steps: int
    settling_steps: int


class TakeSteps(Struct, frozen=True, tag=True):
    """Go on training for so many steps, which every rank counts by itself."""

    steps: int


class PriceCompression(Struct, frozen=True, tag=True):
    """Measure what selecting and exchanging cost with this compression."""

    compression: Compression


Command = Install | Record | FindCandidates | TimeSteps | TakeSteps | PriceCompression


class Measured(Struct, frozen=True, tag=True):
    """What was recorded and calibrated."""

    trace: Trace
    network: Network


class Unplannable(Struct, frozen=True, tag=True):
    """What was recorded cannot be planned for.

    ``order`` is that in which gradients came first: torch's own buckets follow it.
    """

    why: str
    order: tuple[str, ...]


class Candidates(Struct, frozen=True, tag=True):
    """Plans that are worth trying, the most promising first, the baseline last."""

    candidates: tuple[Candidate, ...]


class SlowestRank(Struct, frozen=True, tag=True):
    """The median step, each as long as on the slowest rank."""

    step_s: float


class StepsTaken(Struct, frozen=True, tag=True):
    """The number of the training step that comes next, as warm-ups count them."""

    next_step: int


class CompressionPrice(Struct, frozen=True, tag=True):
    """On the slowest rank: what an element costs to select from, and the exchange's cost."""

    selection_s_per_element: float
    exchange: Line


class Failed(Struct, frozen=True, tag=True):
    """The command could not be carried out on some rank; the session gives up."""

    why: str


Reply = Measured | Unplannable | Candidates | SlowestRank | StepsTaken | CompressionPrice | Failed

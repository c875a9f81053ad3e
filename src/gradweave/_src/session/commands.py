"""What a planning session asks for, and what it is told.

Commands and replies are values. Whatever carries out commands makes a reply the same on every rank,
so sessions that have been told the same ask for the same.
"""

from enum import StrEnum

from msgspec import Struct

from gradweave._src.compression import Compression
from gradweave._src.costs import Line
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.learning import MessageSample
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import Way


class SimpleBuckets(StrEnum):
    """Ways to group gradients without a plan."""

    ONE = "everything in one bucket"
    ORIGINAL = "what the wrapper began with"


class Install(Struct, frozen=True, tag=True):
    """Send these buckets from the next pass on. There is no reply.

    ``order`` is the order in which gradients come, for a wrapper whose first buckets follow it.
    ``notes_messages`` asks for when each message is ready and done, to be told with step times.
    """

    buckets: Plan | SimpleBuckets
    order: tuple[str, ...] = ()
    notes_messages: bool = False


class Record(Struct, frozen=True, tag=True):
    """Note in so many steps when gradients are ready, whatever buckets they travel in."""

    steps: int


class Probe(Struct, frozen=True, tag=True):
    """Send a few messages beside the training, where it sends none of that kind and size.

    The first ``required_sizes`` of the sizes, smallest first, are sent once in any case. Others,
    and repeats, are sent as long as all messages together exceed neither ``within_s`` nor
    ``within_bytes``.
    """

    ways: tuple[Way, ...]
    sizes_bytes: tuple[int, ...]
    required_sizes: int
    within_s: float
    within_bytes: int


class FindCandidates(Struct, frozen=True, tag=True):
    """Compute the plans that are worth trying, with this compression."""

    trace: Trace
    network: Network
    compression: Compression | None


class TimeSteps(Struct, frozen=True, tag=True):
    """Say how long steps take on the slowest rank, after some that do not count.

    Fewer steps are enough where the first ``HOPELESS_AFTER_STEPS`` all take longer than
    ``hopeless_s``.
    """

    steps: int
    settling_steps: int
    hopeless_s: float | None = None


class TakeSteps(Struct, frozen=True, tag=True):
    """Go on training for so many steps, which every rank counts by itself."""

    steps: int


class PriceCompression(Struct, frozen=True, tag=True):
    """Measure what selecting and exchanging cost with this compression."""

    compression: Compression


Command = Install | Record | Probe | FindCandidates | TimeSteps | TakeSteps | PriceCompression


class Recorded(Struct, frozen=True, tag=True):
    """When gradients are ready, on the rank where each is last."""

    trace: Trace
    passes: int = 1  # forward passes in a step, of which the last was recorded


class Probed(Struct, frozen=True, tag=True):
    """What the messages beside the training took; nothing where there was no time for them."""

    samples: tuple[MessageSample, ...]
    taken_s: float = 0.0  # all of them together
    sent_bytes: int = 0


class Unplannable(Struct, frozen=True, tag=True):
    """What was recorded cannot be planned for.

    ``order`` is the order in which gradients came first: torch's own buckets follow it.
    """

    why: str
    order: tuple[str, ...]


class Candidates(Struct, frozen=True, tag=True):
    """Plans that are worth trying, the most promising first, the baseline last."""

    candidates: tuple[Candidate, ...]


class StepsTimed(Struct, frozen=True, tag=True):
    """Steps, each as long as on the slowest rank, and what their messages say of the network."""

    steps_s: tuple[float, ...]
    samples: tuple[MessageSample, ...] = ()


class StepsTaken(Struct, frozen=True, tag=True):
    """The number of the training step that comes next, as warm-ups count them."""

    next_step: int


class CompressionPrice(Struct, frozen=True, tag=True):
    """What selecting costs for each element, and what the exchange costs, on the slowest rank."""

    selection_s_per_element: float
    exchange: Line


class Failed(Struct, frozen=True, tag=True):
    """The command could not be carried out on some rank; the session gives up.

    ``may_come_of_others`` says that it may have failed only because another rank could not do it.
    """

    why: str
    may_come_of_others: bool = False


Reply = (
    Recorded
    | Unplannable
    | Probed
    | Candidates
    | StepsTimed
    | StepsTaken
    | CompressionPrice
    | Failed
)


class Told(Struct, frozen=True, kw_only=True, tag=True):
    """A reply as all ranks are told it, with how far training was on rank 0 at that moment."""

    reply: Reply
    steps: int  # since the first
    elapsed_s: float

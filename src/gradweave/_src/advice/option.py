"""What could be done, and what it would bring."""

from msgspec import Struct


class Option(Struct, frozen=True, kw_only=True):
    """One way to train, with what it comes to and how to switch it on.

    ``Advice.options`` has them, the most samples per second first.
    """

    name: str
    workers: int
    accumulation: int  # backward passes in a step, of which the last is synchronised
    compute_s: float  # of a step
    exposed_s: float  # of a step, in which computing waits for the network
    step_s: float
    samples_per_s: float  # of all workers
    gain: float  # times the samples per second of what it is compared with
    messages: int
    memory_bytes: int  # of a rank, as gradweave._src.advice.memory counts it
    changes: str  # in the results of training, in words
    code: str


class Unpriced(Struct, frozen=True, kw_only=True):
    """A way to train that nothing is known about, and why; ``Advice.unpriced`` has them."""

    name: str
    reason: str


class Advice(Struct, frozen=True, kw_only=True):
    """What ``advise`` returns: what could be done, the most samples per second first.

    ``unpriced`` is what could not be compared. Gains are over torch's wrapper as it comes.
    """

    trace: str
    network: str
    workers: int
    options: tuple[Option, ...]
    unpriced: tuple[Unpriced, ...]
    why: str  # the first is the first, in a sentence
    extrapolated_from_bytes: int | None  # where the largest message leaves the measured curve

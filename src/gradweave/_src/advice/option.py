"""What could be done, and what it would bring."""

from msgspec import Struct


class Option(Struct, frozen=True, kw_only=True):
    """One way to train, with what it comes to and how to switch it on.

    ``Advice.options`` has them, the most samples per second first.

    Attributes:
        name: the way, as `gradweave advise` prints it.
        workers: how many workers train.
        accumulation: backward passes in a step, of which the last is synchronised.
        compute_s: seconds that a step computes.
        exposed_s: seconds of a step in which computing waits for the network.
        step_s: seconds of a step, predicted.
        samples_per_s: samples per second of all workers together.
        gain: how many times the samples per second of torch's wrapper as it comes.
        messages: how many messages a step sends, counting both halves of a bucket as one.
        memory_bytes: bytes that a rank keeps for parameters, gradients, buckets and Adam's state.
        changes: what changes in the results of training, in words.
        code: the line of code that switches it on.
    """

    name: str
    workers: int
    accumulation: int
    compute_s: float
    exposed_s: float
    step_s: float
    samples_per_s: float
    gain: float
    messages: int
    memory_bytes: int
    changes: str
    code: str


class Unpriced(Struct, frozen=True, kw_only=True):
    """A way to train that could not be compared; ``Advice.unpriced`` has them.

    Attributes:
        name: the way, as `gradweave advise` prints it.
        reason: why nothing is known about it, in words.
    """

    name: str
    reason: str


class Advice(Struct, frozen=True, kw_only=True):
    """What ``advise`` returns: ways to train a model on a network, compared by prediction.

    Attributes:
        trace: the trace's name.
        network: the network's name.
        workers: how many workers there are.
        options: what could be done, the most samples per second first.
        unpriced: what could not be compared, and why.
        why: why the first option is the first, in a sentence.
        extrapolated_from_bytes: the largest message that was measured, if some are larger; their
            prices are extrapolated. None if there is no larger one.
    """

    trace: str
    network: str
    workers: int
    options: tuple[Option, ...]
    unpriced: tuple[Unpriced, ...]
    why: str
    extrapolated_from_bytes: int | None

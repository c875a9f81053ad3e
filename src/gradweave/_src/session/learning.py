"""What messages cost, learnt from those that training sends anyway, and from a few beside it.

Every bucket of an ordinary step is a sample of the network's curve: it was ready at one moment and
back at another. Plans with other buckets add samples of other sizes, so what is known grows where
it is needed. docs/measuring.md says what a sample is.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gradweave._src.costs import Curve, Line
from gradweave._src.errors import RequestError
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.vocabulary import KIB, MIB, Operation, Way

LEARNT = "learnt in training"  # what such a network is called
NONE_SEEN = "no message of the training was seen"
# Sizes that differ by a smaller factor are one point of a curve.
SAME_SIZE = 1.1
# Curves begin at this size; smaller messages cost as much.
SMALLEST_BYTES = KIB
# Where start-ups and bytes cannot be told apart, because all samples are alike, half of what they
# took is start-up until there are others.
STARTUP_OF_ALIKE = 0.5
# Extrapolated start-ups and slopes stay within these shares of the nearest point: noise must make
# neither small messages nor many bytes free.
LEAST_STARTUP = 0.05
LEAST_SLOPE = 0.25
# A message keeps the next one waiting for at least this share of what it takes.
LEAST_GAP = 0.2
SHORTEST_S = 1e-7

# Sizes of the messages that are sent beside training, where it sends none so small.
PROBED_BYTES = (KIB, 64 * KIB)
# The same where training's own messages are sparse: nothing else tells what dense ones would cost.
PROBED_BYTES_OF_SPARSE = (KIB, 64 * KIB, MIB)
# For each size a probe sends a message that brings ranks together, one alone, and so many in a
# stream.
STREAMED = 4
MESSAGES_PER_PROBE = 2 + STREAMED
# Determinants below this share of their terms are rounding.
ROUNDING = 1e-9


class MessageTimes(Struct, frozen=True, kw_only=True, array_like=True):
    """One message as one rank saw it, in seconds of that rank's clock."""

    operation: Operation
    collective: str
    nbytes: int
    ready_s: float
    done_s: float


class MessageSample(Struct, frozen=True, kw_only=True, array_like=True):
    """How long messages took that kept the network busy without a pause, one or several.

    They overlap, so it is not known when one of them ended and the next began.
    """

    operation: Operation
    collective: str
    sizes_bytes: tuple[int, ...]
    taken_s: float


def samples_of(ranks: Sequence[Sequence[MessageTimes]]) -> list[MessageSample]:
    """Return what one step's messages, as all ranks saw them, say about the network.

    The rank that was ready last waited for nobody else, so it saw messages take the shortest time
    of all ranks. Clocks need not agree.
    """
    by_queue = [_by_queue(times) for times in ranks]
    samples = []
    for queue in by_queue[0]:
        of_ranks = [of_rank.get(queue, []) for of_rank in by_queue]
        if len(set(map(len, of_ranks))) == 1:  # otherwise the step was cut in the middle
            for first, last in _busy(of_ranks):
                stretch = of_ranks[0][first:last]
                if len({one.collective for one in stretch}) > 1:
                    continue  # nobody knows which of them took how much of the time
                taken_s = min(_taken_s(of_rank[first:last]) for of_rank in of_ranks)
                samples.append(
                    MessageSample(
                        operation=stretch[0].operation,
                        collective=stretch[0].collective,
                        sizes_bytes=tuple(one.nbytes for one in stretch),
                        taken_s=max(SHORTEST_S, taken_s),
                    )
                )
    return samples


class _Queue(NamedTuple):
    """Messages that wait for each other: those of the backend, and those on our threads."""

    operation: Operation
    is_native: bool


def _by_queue(times: Iterable[MessageTimes]) -> dict[_Queue, list[MessageTimes]]:
    found: dict[_Queue, list[MessageTimes]] = defaultdict(list)
    for one in sorted(times, key=lambda one: one.ready_s):
        found[_Queue(one.operation, one.collective == "native")].append(one)
    return found


def _busy(of_ranks: Sequence[Sequence[MessageTimes]]) -> list[tuple[int, int]]:
    """Return the ranges of messages that followed each other without a pause, on all ranks."""
    edges = [0]
    free_s = [one.done_s for one, *_ in of_ranks]
    for number in range(1, len(of_ranks[0])):
        now = [of_rank[number] for of_rank in of_ranks]
        if any(one.ready_s >= free for one, free in zip(now, free_s, strict=True)):
            edges.append(number)
        free_s = [max(one.done_s, free) for one, free in zip(now, free_s, strict=True)]
    return list(pairwise([*edges, len(of_ranks[0])]))


def _taken_s(messages: Sequence[MessageTimes]) -> float:
    return max(one.done_s for one in messages) - messages[0].ready_s


def learnt_network(
    samples: Iterable[MessageSample], *, workers: int, model_bytes: int
) -> Network | None:
    """Return what messages of up to ``model_bytes`` cost by the samples; None without samples."""
    by_way: dict[Way, list[MessageSample]] = defaultdict(list)
    for sample in samples:
        by_way[Way(sample.operation, sample.collective)].append(sample)
    if not by_way:
        return None
    costs = []
    for way, of_way in by_way.items():
        latency_s = _latency_s(of_way)
        costs.append(
            CollectiveCost(
                operation=way.operation,
                collective=way.collective,
                workers=workers,
                beside="compute",
                cost=_curve(of_way, latency_s, model_bytes),
                latency_s=latency_s,
            )
        )
    count = sum(len(sample.sizes_bytes) for of_way in by_way.values() for sample in of_way)
    return Network(
        name=LEARNT,
        source=f"learnt from {count} messages on {workers} ranks",
        costs=tuple(costs),
    )


def sizes_to_probe(
    samples: Iterable[MessageSample], collective: str, *, is_sparse: bool, model_bytes: int
) -> tuple[int, ...]:
    """Return the sizes that predictions need and training does not send, smallest first.

    None is larger than the model: no message ever is.
    """
    wanted = PROBED_BYTES_OF_SPARSE if is_sparse else PROBED_BYTES
    sizes = dict.fromkeys(min(size, model_bytes) for size in wanted)
    seen = [
        size for sample in samples if sample.collective == collective for size in sample.sizes_bytes
    ]
    if is_sparse or not seen:
        return tuple(sizes)
    return tuple(size for size in sizes if 2 * size < min(seen))


def probe_takes_s(samples: Sequence[MessageSample], nbytes: int) -> float:
    """Estimate what a probe of this size will take, as far as messages of other sizes tell.

    The start-up is what probing is to find out, so this takes it to be small. Raise RequestError
    where no message was seen.
    """
    if not samples:
        raise RequestError(NONE_SEEN)
    largest = max(samples, key=lambda sample: sum(sample.sizes_bytes))
    s_per_byte = largest.taken_s / sum(largest.sizes_bytes)
    startup_s = LEAST_STARTUP * min(s.taken_s / len(s.sizes_bytes) for s in samples)
    return MESSAGES_PER_PROBE * (startup_s + s_per_byte * nbytes)


def _latency_s(samples: Sequence[MessageSample]) -> float:
    """Return how long after the next could leave a message arrives; 0 where that is unknown.

    It shows where messages of one size travelled both alone and in streams.
    """
    taken_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if len(set(sample.sizes_bytes)) == 1:
            taken_s[sample.sizes_bytes[0], len(sample.sizes_bytes)].append(sample.taken_s)
    apart_s = [
        median(taken_s[size, 1]) - (median(of_stream) - median(taken_s[size, 1])) / (count - 1)
        for (size, count), of_stream in list(taken_s.items())
        if count > 1 and taken_s.get((size, 1))
    ]
    return max(0.0, median(apart_s)) if apart_s else 0.0


def _curve(samples: Sequence[MessageSample], latency_s: float, model_bytes: int) -> Curve:
    """Return a curve through what messages of each size took, which a line continues.

    Messages that overlapped share their time in proportion to what the line says of each.
    """
    lasting_s = [max(s.taken_s - latency_s, LEAST_GAP * s.taken_s) for s in samples]
    line = _line([s.sizes_bytes for s in samples], lasting_s)
    gaps: list[tuple[int, float]] = []
    for sample, busy_s in zip(samples, lasting_s, strict=True):
        sizes = np.array(sample.sizes_bytes, dtype=np.float64)
        shares = line.seconds(sizes).tolist()
        whole = fsum(shares)
        gaps += zip(sample.sizes_bytes, (busy_s * share / whole for share in shares), strict=True)
    known = _points(gaps)
    smallest, largest = min(known), max(known)
    if smallest > SMALLEST_BYTES:
        startup_s = min(max(line.startup_s, LEAST_STARTUP * known[smallest]), known[smallest])
        known = {SMALLEST_BYTES: startup_s, **known}
    beyond = max(model_bytes, 2 * largest)
    known[beyond] = known[largest] + line.s_per_byte * (beyond - largest)
    return Curve(nbytes=tuple(known), measured_s=tuple(known.values()))


def _line(sizes_bytes: Sequence[tuple[int, ...]], lasting_s: Sequence[float]) -> Line:
    """Fit a start-up for each message and a price for each byte, with the least relative errors.

    Sums are exact, so that every rank comes to the same bits, whatever its processor.
    """
    counts = [len(sizes) for sizes in sizes_bytes]
    nbytes = [sum(sizes) for sizes in sizes_bytes]
    each = list(zip(counts, nbytes, lasting_s, strict=True))
    of_counts = fsum((count / taken_s) ** 2 for count, _, taken_s in each)
    of_bytes = fsum((size / taken_s) ** 2 for _, size, taken_s in each)
    of_both = fsum((count / taken_s) * (size / taken_s) for count, size, taken_s in each)
    determinant = of_counts * of_bytes - of_both**2
    _, largest, largest_s = max(each, key=lambda one: one[1])
    message_s = [taken_s / count for count, _, taken_s in each]
    if determinant <= ROUNDING * of_counts * of_bytes:
        return Line(
            startup_s=STARTUP_OF_ALIKE * median(message_s),
            s_per_byte=STARTUP_OF_ALIKE * largest_s / largest,
        )
    by_counts = fsum(count / taken_s for count, _, taken_s in each)
    by_bytes = fsum(size / taken_s for _, size, taken_s in each)
    startup_s = (by_counts * of_bytes - by_bytes * of_both) / determinant
    s_per_byte = (by_bytes * of_counts - by_counts * of_both) / determinant
    return Line(
        startup_s=max(startup_s, LEAST_STARTUP * min(message_s)),
        s_per_byte=max(s_per_byte, LEAST_SLOPE * largest_s / largest),
    )


def _points(gaps: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return how long each size keeps the next message waiting; larger ones never keep it less."""
    of_size: dict[int, list[float]] = {}
    for nbytes, gap_s in sorted(gaps):
        known = next(reversed(of_size), None)
        size = known if known is not None and nbytes < SAME_SIZE * known else nbytes
        of_size.setdefault(size, []).append(gap_s)
    gaps_s = [median(taken_s) for taken_s in of_size.values()]
    weights = [len(taken_s) for taken_s in of_size.values()]
    return dict(zip(of_size, _never_falling(gaps_s, weights), strict=True))


def _never_falling(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the nearest values that never fall: neighbours in the wrong order share their mean."""
    blocks: list[tuple[float, int, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, count = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]

"""Calibrating: what messages really cost on a group, idle and beside compute, as a Network.

What each number means is in docs/measuring.md.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from math import sqrt
from statistics import mean, median
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist

from gradweave._src.clocks import clock_for, taken_s
from gradweave._src.collectives import names
from gradweave._src.collectives import ways as ways_of
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.lanes import Lanes
from gradweave._src.comm.small_messages import (
    FIRST_TAG,
    for_texts,
    largest,
    payload_device,
)
from gradweave._src.costs import Curve, Level, Link, Links
from gradweave._src.device_order import own_stream
from gradweave._src.errors import RequestError
from gradweave._src.measure.load import computing
from gradweave._src.measure.sampled_pairs import TierSample, sampled_pairs, typical
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.planning import OPERATIONS
from gradweave._src.travel import parse_travel
from gradweave._src.vocabulary import KIB, MIB, Beside, Operation, Way, alternatives

NATIVE = Way("all-reduce", "native")
# Types that backends can sum, by the names of the compressions that round to them.
ROUNDED_TO = {"fp16": torch.float16, "bf16": torch.bfloat16}

SMALLEST_BYTES = KIB
LARGEST_BYTES = 16 * MIB
SIZE_FACTOR = 8
# Between two sizes another one is measured. Where the straight line between its neighbours is wrong
# by more than this, and by more than noise explains, the gap is halved again, down to a factor of
# two.
INTERPOLATION_ERROR = 0.10
FINEST_FACTOR = 2.1

# A stream of messages is timed as one, and is so long that clocks do not matter, that noise evens
# out, and that what only its first message takes is small beside it: with 0.1 s, in which 8 ranks
# on two cores send four messages, small ones seemed a third dearer than they are in training.
STREAM_S = 0.3
MOST_MESSAGES = 16
MOST_STREAM_BYTES = 64 * MIB
LEAST_SHARE = 0.5
# Messages are handed over four times as fast as they are done, unless that is too fast to tell.
PAUSE_SHARE = 0.25
SHORTEST_PAUSE_S = 1e-4
# Messages that take longer, and all that are timed beside compute, are repeated less often.
LONG_S = 0.1
LONG_REPEATS = 3
# A collective so many times as slow as the fastest one at the same size is not timed at larger
# sizes.
HOPELESS = 3.0
JUDGED_BYTES = 512 * KIB

# Between two ranks the first size tells the latency, and the slope between the last two the rate,
# for switches and shapers let a short burst pass at more than their rate.
BETWEEN_TWO_BYTES = (KIB, 2 * MIB, 8 * MIB)
BETWEEN_TWO_REPEATS = 7
SUMMED_BYTES = 4 * MIB

# For each kind of samples, a context that keeps workers busy as they are beside such messages.
Surroundings = Mapping[Beside, Callable[[], AbstractContextManager[object]]]


def calibrate(
    group: dist.ProcessGroup,
    *,
    name: str,
    operations: Sequence[Operation] = ("all-reduce",),
    collectives: Sequence[str] = ("native",),
    largest_bytes: int = LARGEST_BYTES,
    repeats: int = 7,
    device: torch.device | None = None,
) -> Network:
    """Measure what messages cost in a process group, for ``make_plan`` and ``simulate``.

    Operations by collectives are timed on idle workers and beside matrix products, and so are the
    links between some pairs of ranks. Collectives that are three times as slow as the fastest are
    left out. Call it on every rank, with nothing else on the group: it takes seconds to minutes,
    and all ranks return the same. `gradweave calibrate` does this on an emulated cluster or under
    torchrun.

    Args:
        group: the group whose messages are timed.
        name: what the network is to be called.
        operations: "all-reduce", "broadcast", "reduce", "reduce-scatter" or "all-gather"; plans for
            both passes need the first and the last two.
        collectives: the algorithms, as `gradweave list collectives` names them, each for the
            operations that it has; "native" is the backend's own.
        largest_bytes: the largest message, at least 8 KiB.
        repeats: how often each size is timed.
        device: where messages are (default: what the group sends from). On an accelerator they
            are queued on a stream of their own, and only that is waited for.

    Raises:
        RequestError: if the group has one rank, the largest message is too small, there is no such
            operation or collective, or a collective has none of the operations.

    Examples:
        Under torchrun with two ranks or more:

            network = gradweave.calibrate(torch.distributed.group.WORLD, name="my cluster")
            gradweave.write("network.json", network)
    """
    return measure_network(
        group,
        name=name,
        ways=_asked_ways(operations, collectives),
        largest_bytes=largest_bytes,
        repeats=repeats,
        device=device,
    )


def _asked_ways(operations: Sequence[Operation], collectives: Sequence[str]) -> tuple[Way, ...]:
    known = get_args(Operation)
    for operation in operations:
        if operation not in known:
            raise RequestError(f"no operation {operation!r}{alternatives(operation, known)}")
    asked = ways_of(operations, collectives)
    for collective in collectives:
        if all(way.collective != collective for way in asked):
            have = dict.fromkeys(name for one in operations for name in ("native", *names(one)))
            what = " or ".join(operations)
            raise RequestError(f"no {what} by {collective!r}{alternatives(collective, have)}")
    return asked


def measure_network(
    group: dist.ProcessGroup,
    *,
    name: str,
    ways: Sequence[Way] = (NATIVE,),
    largest_bytes: int = LARGEST_BYTES,
    repeats: int = 7,
    beside: Surroundings | None = None,
    communicator: Communicator | None = None,
    other_lanes: Sequence[Communicator] = (),
    device: torch.device | None = None,
    keeps_slow: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Network:
    """Do what ``calibrate`` does, for callers who know more about the group and the job.

    Args:
        group: as of ``calibrate``, and so for ``name``, ``largest_bytes``, ``repeats``, ``device``.
        name: what the network is to be called.
        ways: the operations and collectives to time.
        largest_bytes: the largest message.
        repeats: how often each size is timed.
        beside: what ranks do meanwhile, by name (default: nothing, and matrix products).
        communicator: what runs the collectives (default: a new one on ``group``).
        other_lanes: reduce-scatters and all-gathers take turns on the group and these; give one
            less than ShardedDataParallel has threads, so that their curves are true for it.
        device: where messages are.
        keeps_slow: whether algorithms stay that are hopelessly slow.
        advance: is called when a size is done.
    """
    if group.size() == 1:
        raise RequestError("one worker sends no messages; calibrate a group of at least two")
    if largest_bytes < SMALLEST_BYTES * SIZE_FACTOR:
        raise RequestError(
            f"calibrate up to at least {SMALLEST_BYTES * SIZE_FACTOR} bytes, got {largest_bytes}"
        )
    communicator = communicator or Communicator(group)
    device = payload_device(group) if device is None else device
    if beside is None:
        beside = {"nothing": nullcontext, "compute": partial(computing, device)}
    is_sharded = any(way.operation in OPERATIONS["both"] for way in ways)
    with (
        own_stream(device),
        closing(Lanes([communicator, *other_lanes] if is_sharded else ())) as lanes,
    ):
        survey = _Survey(
            communicator,
            lanes,
            list(ways),
            repeats=repeats,
            beside=beside,
            device=device,
            keeps_slow=keeps_slow,
        )
        _measure_sizes(survey, _coarse_sizes(largest_bytes), advance)
        links, samples = _measure_links(communicator, device)
    sure = "; ".join(sample.text() for sample in samples)
    advance()
    return Network(
        name=name,
        source=f"measured on {group.size()} ranks, {group.name()}, torch {torch.__version__}; "
        f"links between two, from the innermost tier on: {sure}",
        costs=tuple(survey.costs()),
        links=links,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one message alone, and per message in a stream."""

    alone_s: float
    share_s: float
    messages: int
    noise: float  # how far the middle half of the shares reaches from the median, as a share

    @property
    def latency_s(self) -> float:
        """How much longer the first message of a stream takes than a further one."""
        further_s = (self.messages * self.share_s - self.alone_s) / (self.messages - 1)
        return max(0.0, self.alone_s - further_s)

    def gap_s(self, latency_s: float) -> float:
        """Return what a further message takes if the first one takes ``latency_s`` more.

        Noise must not make messages seem free: it is at least half of an equal share.
        """
        further_s = self.share_s - latency_s / self.messages
        return min(self.alone_s, max(further_s, LEAST_SHARE * self.share_s))


def sample_of(once_s: Sequence[float], stream_s: Sequence[float], messages: int) -> Sample:
    """Sum up the times of one message and of streams of so many, which took turns."""
    shares_s = [all_s / messages for all_s in stream_s]
    low_s, share_s, high_s = np.quantile(shares_s, [0.25, 0.5, 0.75]).tolist()
    return Sample(median(once_s), share_s, messages, noise=(high_s - low_s) / share_s)


def gaps_of(samples: Sequence[Sample]) -> tuple[list[float], float]:
    """Return how long each size keeps the next message waiting, and the latency of all sizes.

    A stream takes a gap for each of its messages, and the latency once. Shared equally, the latency
    would make each message seem dearer, by a third in a stream of three. The latency at one size is
    the difference of two times, and as noisy as both, so the median over the sizes is taken.
    """
    latency_s = median(sample.latency_s for sample in samples)
    return [sample.gap_s(latency_s) for sample in samples], latency_s


@dataclass(slots=True)
class _Survey:
    """What has been measured so far; the same on every rank, so that all continue alike."""

    communicator: Communicator
    lanes: Lanes
    ways: list[Way]
    repeats: int
    beside: Surroundings
    device: torch.device
    keeps_slow: bool
    samples: dict[tuple[Way, Beside], dict[int, Sample]] = field(default_factory=dict)
    hopeless: set[Way] = field(default_factory=set)

    def measure(self, nbytes: int, beside: Sequence[Beside]) -> None:
        """Time messages of a size; all ways take turns, idle and beside compute."""
        streams = {}
        for way in self.ways:
            if way not in self.hopeless:
                streams[way] = _Stream(self.communicator, self.lanes, way, nbytes, self.device)
        kinds = list(product(streams, beside))
        taken: dict[tuple[Way, Beside], list[list[float]]] = {kind: [] for kind in kinds}
        for repeat in range(self.repeats):
            for way, load in kinds:
                is_long = load == "compute" or streams[way].is_long
                if repeat < (min(LONG_REPEATS, self.repeats) if is_long else self.repeats):
                    with self.beside[load]():
                        taken[way, load].append([streams[way].once_s(), streams[way].all_s()])
        for (way, load), times in taken.items():
            sample = self._agreed(times, streams[way].messages)
            self.samples.setdefault((way, load), {})[nbytes] = sample

    def _agreed(self, times: list[list[float]], messages: int) -> Sample:
        own = [seconds for pair in times for seconds in pair]
        slowest = largest(self.communicator.group, own)
        return sample_of(slowest[0::2], slowest[1::2], messages)

    @property
    def leading(self) -> Beside:
        """The kind of samples that decides what else to measure."""
        return next(iter(self.beside))

    def give_up_on_the_slow(self, nbytes: int) -> None:
        """Stop timing ways that are hopeless at this size: they will be so at larger ones."""
        if self.keeps_slow:
            return
        seconds = {
            way: self.samples[way, self.leading][nbytes].share_s
            for way in self.ways
            if way not in self.hopeless
        }
        for way, share_s in seconds.items():
            rivals = [s for other, s in seconds.items() if _carry_the_same(way, other)]
            if share_s > HOPELESS * min(rivals):
                self.hopeless.add(way)

    def is_bent_at(self, nbytes: int) -> bool:
        """Return whether a straight line between this size's neighbours would have been wrong."""
        for way in set(self.ways) - self.hopeless:
            by_size = self.samples[way, self.leading]
            known = sorted(by_size)
            if nbytes not in known[1:-1]:
                continue
            place = known.index(nbytes)
            ends = [known[place - 1], known[place + 1]]
            guess_s = float(np.interp(nbytes, ends, [by_size[end].share_s for end in ends]))
            noise = max(by_size[size].noise for size in (nbytes, *ends))
            if abs(guess_s / by_size[nbytes].share_s - 1) > INTERPOLATION_ERROR + noise:
                return True
        return False

    def costs(self) -> Iterator[CollectiveCost]:
        for (way, beside), by_size in self.samples.items():
            if way in self.hopeless:
                continue
            sizes = sorted(by_size)
            gaps_s, latency_s = gaps_of([by_size[size] for size in sizes])
            yield CollectiveCost(
                operation=way.operation,
                collective=way.collective,
                workers=self.communicator.group.size(),
                beside=beside,
                cost=Curve(nbytes=tuple(sizes), measured_s=tuple(never_cheaper(gaps_s))),
                latency_s=latency_s,
            )


def _carry_the_same(one: Way, other: Way) -> bool:
    rounded, other_rounded = parse_travel(one.collective), parse_travel(other.collective)
    return (one.operation, rounded.compression) == (other.operation, other_rounded.compression)


class _Stream:
    """Messages of one size that go one way: a single one, or several that follow each other."""

    def __init__(
        self,
        communicator: Communicator,
        lanes: Lanes,
        way: Way,
        nbytes: int,
        device: torch.device,
    ) -> None:
        self._communicator, self._lanes, self._way = communicator, lanes, way
        self._clock = clock_for(device)
        group = communicator.group
        first = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        self._pause_s = 0.0
        for _ in range(max(1, len(lanes))):
            self._send([first])  # the first of its kind builds a program, and ranks compare calls
        own_s = taken_s(self._clock, lambda: self._send([first]))
        (once_s,) = largest(group, [own_s])
        most = max(2, min(MOST_MESSAGES, MOST_STREAM_BYTES // nbytes))
        self.messages = max(2, min(most, round(STREAM_S / once_s)))
        if way.operation in OPERATIONS["both"]:
            # Each lane is used twice, unless that is too much, and all equally often: where the
            # last message travels alone, a short stream is slower than training's messages.
            wanted = min(most, max(self.messages, 2 * len(lanes)))
            self.messages = max(1, wanted // len(lanes)) * len(lanes)
        self.is_long = once_s > LONG_S
        self._pause_s = PAUSE_SHARE * once_s
        self._buffers = [first, *(torch.zeros_like(first) for _ in range(self.messages - 1))]

    def once_s(self) -> float:
        return self._timed(self._buffers[:1])

    def all_s(self) -> float:
        return self._timed(self._buffers)

    def _timed(self, messages: list[torch.Tensor]) -> float:
        for_texts(self._communicator.group).barrier().wait()
        return taken_s(self._clock, lambda: self._send(messages))

    def _send(self, messages: list[torch.Tensor]) -> None:
        send_in_turn(self._communicator, self._lanes, self._way, messages, pause_s=self._pause_s)


def send_in_turn(
    communicator: Communicator,
    lanes: Lanes,
    way: Way,
    messages: Sequence[torch.Tensor],
    *,
    pause_s: float = 0.0,
) -> None:
    """Send messages as wrappers do, one after the other, and wait for all of them."""
    if way.operation == "all-reduce" and parse_travel(way.collective).collective == "native":
        # As DistributedDataParallel does it: messages are handed over one after the other, faster
        # than they are done, while that thread has other things to do, and are then waited for in
        # order. On few cores it matters: handed over all at once, small messages took a fifth
        # longer.
        waits = []
        for message in messages:
            waits.append(_hand_over(communicator.group, way, message))
            if message is not messages[-1] and pause_s > SHORTEST_PAUSE_S:
                time.sleep(pause_s)
        for wait in waits:
            wait()
        return
    operation, collective = way
    if operation in OPERATIONS["both"]:
        sent = [lanes.submit(operation, m, collective=collective) for m in messages]
        for done in sent:
            done.wait()
        return
    for message in messages:
        communicator.run(operation, message, collective=collective)


def _hand_over(group: dist.ProcessGroup, way: Way, message: torch.Tensor) -> Callable[[], object]:
    """Begin an all-reduce, rounded as torch's hooks round it; return a function that waits."""
    compression = parse_travel(way.collective).compression
    if compression is None:
        return group.allreduce([message]).wait
    narrow = message.to(ROUNDED_TO[str(compression)]).div_(group.size())

    def widen(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        message.copy_(future.value()[0])

    return group.allreduce([narrow]).get_future().then(widen).wait


def _measure_sizes(survey: _Survey, sizes: Sequence[int], advance: Callable[[], None]) -> None:
    for size in sizes:
        survey.measure(size, list(survey.beside))
        if size >= JUDGED_BYTES:
            survey.give_up_on_the_slow(size)
        advance()
    unsure = list(pairwise(sizes))
    while unsure:
        low, high = unsure.pop(0)
        middle = round(sqrt(low * high)) // 4 * 4
        survey.measure(middle, [survey.leading])
        advance()
        if high > low * FINEST_FACTOR**2 and survey.is_bent_at(middle):
            unsure += [(low, middle), (middle, high)]


def _coarse_sizes(largest_bytes: int) -> list[int]:
    sizes = []
    size = SMALLEST_BYTES
    while size * sqrt(SIZE_FACTOR) < largest_bytes:
        sizes.append(size)
        size *= SIZE_FACTOR
    return [*sizes, largest_bytes // 4 * 4]


def never_cheaper(seconds: Sequence[float]) -> list[float]:
    """Return the nearest times of which none is shorter than the one before.

    A larger message is not cheaper. Where one seemed to be, that is noise, which is shared among
    neighbours until none seems so. (Least squares by pooling adjacent violators.)
    """
    pools: list[list[float]] = []
    for each_s in seconds:
        pools.append([each_s])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [mean(pool) for pool in pools for _ in pool]


def _measure_links(
    communicator: Communicator, device: torch.device, *, seed: int = 0
) -> tuple[Links, list[TierSample]]:
    """Measure one link for each tier by a few pairs of ranks, and say how sure that is.

    Only a few pairs take turns, so this takes as long in any world.
    """
    factors = communicator.topology.factors
    sum_s_per_byte = _sum_s_per_byte(communicator.group, device)
    levels, samples = [], []
    for tier, members in enumerate(factors):
        pairs = sampled_pairs(communicator.topology, tier, seed=seed)
        sample = _tier_sample([_one_way_s(communicator.group, pair, device) for pair in pairs])
        link = Link(
            latency_s=sample.latency_s.median,
            s_per_byte=sample.s_per_byte.median,
            sum_s_per_byte=sum_s_per_byte,
        )
        is_outermost = tier == len(factors) - 1
        levels.append(Level(members=None if is_outermost else members, link=link))
        samples.append(sample)
    return Links(levels=tuple(levels)), samples


def _tier_sample(one_way_s: Sequence[Sequence[float]]) -> TierSample:
    """Sum up the times of each pair's messages, which are in the order of ``BETWEEN_TWO_BYTES``."""
    _, large, larger = BETWEEN_TWO_BYTES
    return TierSample(
        latency_s=typical([tiny_s for tiny_s, _, _ in one_way_s]),
        s_per_byte=typical(
            [max(0.0, (more_s - much_s) / (larger - large)) for _, much_s, more_s in one_way_s]
        ),
    )


def _one_way_s(
    group: dist.ProcessGroup, ends: tuple[int, int], device: torch.device
) -> list[float]:
    """Return half a round trip for each size: its lower quartile, for noise only adds to it."""
    times_s: list[list[float]] = []
    for nbytes in BETWEEN_TWO_BYTES:
        times_s.append([])
        for _ in range(BETWEEN_TWO_REPEATS):
            times_s[-1].append(_half_round_trip_s(group, ends, nbytes, device))
    for_texts(group).barrier().wait()
    quartiles_s = [float(np.quantile(times, 0.25)) for times in times_s]
    return largest(group, quartiles_s)


def _half_round_trip_s(
    group: dist.ProcessGroup, ends: tuple[int, int], nbytes: int, device: torch.device
) -> float:
    one, other = ends
    if group.rank() not in ends:
        return 0.0
    message = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)

    def there_and_back() -> None:
        if group.rank() == one:
            group.send([message], other, FIRST_TAG).wait()
            group.recv([message], other, FIRST_TAG).wait()
        else:
            group.recv([message], one, FIRST_TAG).wait()
            group.send([message], one, FIRST_TAG).wait()

    return taken_s(clock_for(device), there_and_back) / 2


def _sum_s_per_byte(group: dist.ProcessGroup, device: torch.device) -> float:
    total, received = torch.zeros(2, SUMMED_BYTES // 4, dtype=torch.float32, device=device)
    clock = clock_for(device)
    times_s = [taken_s(clock, lambda: total.add_(received)) for _ in range(BETWEEN_TWO_REPEATS)]
    own_s = float(np.quantile(times_s, 0.25))
    (slowest_s,) = largest(group, [own_s])
    return slowest_s / SUMMED_BYTES

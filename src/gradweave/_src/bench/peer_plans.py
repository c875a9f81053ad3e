"""Torch's own runtimes, to compare with: what they send, and what that is expected to take.

``gradweave._src.bench.peers`` runs them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from gradweave._src.compression import Compression
from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.planning import find_planner, make_plan
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Lane, Span, Timeline
from gradweave._src.trace import Tensor, Trace
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import Operation, Spec, Way, parse_spec, refuse_argument

TORCH = "torch-ddp"
SWEPT = "-tuned"  # behind a name: with the best bucket_cap_mb, found by trying
TUNED = f"{TORCH}{SWEPT}"
NATIVE = Way("all-reduce", "native")
POWER_SGD = "powersgd"
LARGEST_RANK = 64
# torch compresses a matrix if its factors have fewer elements by more than this factor.
LEAST_COMPRESSION = 2


class Job(NamedTuple):
    """What is to be trained, and where."""

    trace: Trace
    network: Network
    workers: int
    copy_s_per_byte: float = 0.0  # of gradients, by the host


class Peer(NamedTuple):
    """How a runtime of torch's is planned for and priced.

    ``plan`` merges by the planner it is given, or by its own. ``predict`` is also told what its
    ranks compute for each bucket, if it ``computes``. ``ways`` are what a calibration has to time.
    """

    plan: Callable[[Job, str], Plan]
    predict: Callable[[Job, Plan, Sequence[float]], Timeline]
    ways: tuple[Way, ...] = (NATIVE,)


def family(runtime: str) -> str:
    """Return the runtime's name without cap and argument: ``powersgd`` for ``powersgd:2``."""
    return parse_spec(runtime).name.removesuffix(SWEPT)


def is_tuned(runtime: str) -> bool:
    """Return whether the runtime's bucket_cap_mb is found by trying."""
    name = parse_spec(runtime).name
    return name.endswith(SWEPT) and family(name) in TUNABLE


def computes(runtime: str) -> bool:
    """Return whether a prediction needs to know what ranks compute for each bucket."""
    return family(runtime) == POWER_SGD


def find_peer(runtime: str) -> Peer | None:
    """Return the peer, None for a runtime of ours; raise RequestError for a wrong argument."""
    spec = parse_spec(runtime)
    if spec.name.endswith(SWEPT) and not is_tuned(runtime):
        return None
    name = family(runtime)
    return PEERS[name](spec) if name in PEERS else None


def power_sgd_rank(runtime: str) -> int:
    """Return 2 for ``powersgd:2``, which approximates matrices by others of rank 2."""
    argument = parse_spec(runtime).argument or ""
    is_short = argument.isascii() and argument.isdecimal() and len(argument) <= len("64")
    if not is_short or not 1 <= int(argument) <= LARGEST_RANK:
        raise RequestError(
            f"{runtime[:40]!r}: powersgd takes a rank from 1 to {LARGEST_RANK}, such as powersgd:1"
        )
    return int(argument)


def _averaging(spec: Spec) -> Peer:
    """Describe torch's wrapper, with or without a hook that rounds."""
    refuse_argument(spec)
    compression = ROUNDED.get(family(spec.name))

    def plan(job: Job, planner: str) -> Plan:
        return make_plan(
            job.trace,
            job.network,
            workers=job.workers,
            planner=planner,
            collective="native",
            compression=compression,
        )

    ways = (NATIVE,) if compression is None else (NATIVE, _rounded(compression))
    return Peer(plan, _beside_backward, ways)


def _rounded(compression: Compression) -> Way:
    return Way("all-reduce", str(Travel("native", compression)))


def _power_sgd(spec: Spec) -> Peer:
    rank = power_sgd_rank(str(spec))
    return Peer(_natively, partial(_low_ranks, rank))


def _zero(spec: Spec) -> Peer:
    refuse_argument(spec)
    return Peer(_natively, _then_broadcasts, (NATIVE, Way("broadcast", "native")))


def _fsdp2(spec: Spec) -> Peer:
    """Describe fully_shard, whose groups a planner merges: ``fsdp2:single`` has a single group."""
    planner = spec.argument or "ddp"
    find_planner(planner)

    def plan(job: Job, _: str) -> Plan:
        merged = _natively(job, planner)
        return Plan(planner=planner, buckets=merged.buckets, overlap=False, passes="both")

    return Peer(plan, _one_by_one, (NATIVE, Way("all-gather", "native")))


def _natively(job: Job, planner: str) -> Plan:
    return make_plan(
        job.trace, job.network, workers=job.workers, planner=planner, collective="native"
    )


def _beside_backward(job: Job, plan: Plan, computing_s: Sequence[float]) -> Timeline:
    """Predict torch's wrapper, which copies gradients into its buckets and out of them."""
    del computing_s
    return simulate(
        job.trace,
        plan,
        job.network,
        workers=job.workers,
        copy_s_per_byte=job.copy_s_per_byte,
        idle_after_backward=True,
    )


def _then_broadcasts(job: Job, plan: Plan, computing_s: Sequence[float]) -> Timeline:
    """Predict ZeRO, whose ranks update and broadcast their shares when all gradients are there."""
    averaged = _beside_backward(job, plan, computing_s)
    sent = _Sender(job, averaged.iteration_s)
    broadcasts = [sent.span("broadcast", share) for share in zero_shares(job.trace, job.workers)]
    return Timeline(spans=(*averaged.spans, *broadcasts))


def _low_ranks(rank: int, job: Job, plan: Plan, computing_s: Sequence[float]) -> Timeline:
    """Predict PowerSGD, which sends three messages for each bucket and waits for each of them."""
    computed = simulate(job.trace, plan, job.network, workers=1)
    spans = list(computed.spans)
    sent = _Sender(job, job.trace.forward_s)
    groups = _groups(job.trace, plan.lengths)
    for tensors, seconds in zip(groups, computing_s, strict=True):
        sent.wait_until(job.trace.forward_s + tensors[-1].ready_s)
        spans.append(sent.occupied("matrix products", tensors, seconds, nbytes=0))
        sizes = filter(None, low_rank_bytes(tensors, rank))
        spans += [sent.span("all-reduce", tensors, nbytes=nbytes) for nbytes in sizes]
    return Timeline(spans=tuple(spans))


def low_rank_bytes(tensors: Sequence[Tensor], rank: int) -> tuple[int, int, int]:
    """Return the bytes that PowerSGD's hook sends of a bucket: whole tensors and both factors."""
    whole = left = right = 0
    for tensor in tensors:
        rows = tensor.elements if tensor.shape is None else tensor.shape[0]
        columns = tensor.elements // rows
        used = min(rows, columns, rank)
        if (rows + columns) * used * LEAST_COMPRESSION < rows * columns:
            left += rows * used * tensor.bytes_per_element
            right += columns * used * tensor.bytes_per_element
        else:
            whole += tensor.nbytes
    return whole, left, right


def zero_shares(trace: Trace, workers: int) -> list[list[Tensor]]:
    """Return which tensors each rank updates, as ZeroRedundancyOptimizer divides them.

    The largest come first, and each goes to the rank that has the least so far. Ranks that have
    nothing are left out.
    """
    shares: list[list[Tensor]] = [[] for _ in range(workers)]
    held = [0] * workers
    for tensor in sorted(trace.tensors, key=lambda one: one.elements, reverse=True):
        rank = held.index(min(held))
        shares[rank].append(tensor)
        held[rank] += tensor.elements
    return [share for share in shares if share]


def _one_by_one(job: Job, plan: Plan, computing_s: Sequence[float]) -> Timeline:
    """Predict fully_shard on a host, which waits for each message and computes nothing meanwhile.

    Each group is gathered before its forward and again before its backward, and scattered after it.
    gloo's reduce-scatter is at least as dear as its all-reduce, and priced as one.
    """
    del computing_s
    groups = list(_groups(job.trace, plan.lengths))
    spans: list[Span] = []
    sent = _Sender(job, 0.0)
    for tensors in reversed(groups):
        spans.append(sent.span("all-gather", tensors))
        for tensor in reversed(tensors):
            spans += sent.computing("forward", tensor, tensor.forward_s)
    ready_s = [0.0, *(tensors[-1].ready_s for tensors in groups)]
    for tensors, (before_s, after_s) in zip(groups, pairwise(ready_s), strict=True):
        spans.append(sent.span("all-gather", tensors))
        spans += sent.computing("backward", tensors[-1], after_s - before_s)
        spans.append(sent.span("reduce-scatter", tensors))
    return Timeline(spans=tuple(spans))


# Operations that are priced as another one on gloo.
PRICED_AS: Mapping[Operation, Operation] = {"reduce-scatter": "all-reduce"}


def _groups(trace: Trace, lengths: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    for begin, end in pairwise([0, *accumulate(lengths)]):
        yield trace.tensors[begin:end]


class _Sender:
    """Makes spans that follow each other."""

    def __init__(self, job: Job, now_s: float) -> None:
        self._job, self._now_s = job, now_s

    def wait_until(self, moment_s: float) -> None:
        self._now_s = max(self._now_s, moment_s)

    def span(
        self, operation: Operation, tensors: Sequence[Tensor], *, nbytes: int | None = None
    ) -> Span:
        """Return the span of a message that overlaps no other, by default of whole tensors."""
        network, workers = self._job.network, self._job.workers
        if nbytes is None:
            nbytes = sum(tensor.nbytes for tensor in tensors)
        priced = PRICED_AS.get(operation, operation)
        seconds = network.seconds(priced, "native", nbytes=nbytes, workers=workers)
        latency_s = network.latency_s("native", workers=workers, operation=priced)
        return self.occupied(operation, tensors, seconds + latency_s, nbytes=nbytes)

    def occupied(
        self, label: str, tensors: Sequence[Tensor], seconds: float, *, nbytes: int
    ) -> Span:
        begin_s = self._now_s
        self._now_s += seconds
        return Span(
            lane="communication",
            label=label,
            start_s=begin_s,
            end_s=self._now_s,
            tensors=tuple(tensor.name for tensor in tensors),
            nbytes=nbytes,
        )

    def computing(self, lane: Lane, tensor: Tensor, seconds: float) -> list[Span]:
        """Return the span of computing for a tensor, or no span where it takes no time."""
        begin_s = self._now_s
        self._now_s += seconds
        if seconds == 0:
            return []
        return [
            Span(
                lane=lane,
                label=tensor.name,
                start_s=begin_s,
                end_s=self._now_s,
                tensors=(tensor.name,),
            )
        ]


ROUNDED = {
    "torch-fp16": Compression(method="fp16"),
    "torch-bf16": Compression(method="bf16"),
}
# Their bucket_cap_mb can be swept.
TUNABLE = (TORCH, *ROUNDED)

PEERS: Mapping[str, Callable[[Spec], Peer]] = {
    **dict.fromkeys(TUNABLE, _averaging),
    POWER_SGD: _power_sgd,
    "zero": _zero,
    "fsdp2": _fsdp2,
}

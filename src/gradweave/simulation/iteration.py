"""One training step on paper: forward, backward, and the messages a plan sends."""

from collections.abc import Iterator

import numpy as np

from gradweave.compression import Compression
from gradweave.costs.cost import FloatArray
from gradweave.network import Network
from gradweave.plan import Bucket, Plan
from gradweave.timeline import Span, Timeline
from gradweave.trace import Trace


def simulate(trace: Trace, plan: Plan, network: Network, *, workers: int) -> Timeline:
    """Each bucket leaves once its last tensor is ready and the bucket before it has left.

    It arrives the network's latency later; meanwhile the next one is on its way.
    """
    plan.check_describes(trace)
    spans = [*_forward(trace), *_backward(trace), *_messages(trace, plan, network, workers)]
    return Timeline(spans=tuple(spans))


def _forward(trace: Trace) -> Iterator[Span]:
    now_s = 0.0
    for tensor in reversed(trace.tensors):
        if tensor.forward_s > 0:
            end_s = now_s + tensor.forward_s
            yield Span(
                lane="forward",
                label=tensor.name,
                start_s=now_s,
                end_s=end_s,
                tensors=(tensor.name,),
            )
            now_s = end_s


def _backward(trace: Trace) -> Iterator[Span]:
    begin_s = trace.forward_s
    now_s = begin_s
    for tensor in trace.tensors:
        end_s = begin_s + tensor.ready_s
        if end_s > now_s:
            yield Span(
                lane="backward",
                label=tensor.name,
                start_s=now_s,
                end_s=end_s,
                tensors=(tensor.name,),
            )
            now_s = end_s


def _messages(trace: Trace, plan: Plan, network: Network, workers: int) -> Iterator[Span]:
    if workers == 1:
        return
    begin_s = trace.forward_s
    free_s = begin_s
    nbytes = bucket_bytes(trace, plan)
    last_tensors = np.cumsum(plan.lengths) - 1
    price = {way: _priced(network, way, workers, nbytes) for way in set(map(_way, plan.buckets))}
    for number, bucket in enumerate(plan.buckets):
        last = trace.tensors[last_tensors[number]] if plan.overlap else trace.tensors[-1]
        free_s = max(free_s, begin_s + last.ready_s)
        phases = price[_way(bucket)]
        for phase, seconds in phases:
            leave_s = free_s + float(seconds[number])
            is_last = phase == phases[-1][0]
            latency_s = network.latency_s(bucket.collective, workers=workers) if is_last else 0.0
            yield Span(
                lane="communication",
                label=f"{phase} {number + 1}",
                start_s=free_s,
                end_s=leave_s + latency_s,
                tensors=bucket.tensors,
                nbytes=int(nbytes[number]),
            )
            free_s = leave_s


def bucket_bytes(trace: Trace, plan: Plan) -> FloatArray:
    starts = np.concatenate([[0], np.cumsum(plan.lengths)[:-1]])
    return np.add.reduceat(trace.nbytes, starts)


Way = tuple[str, Compression | None]


def _way(bucket: Bucket) -> Way:
    return bucket.collective, bucket.compression


def _priced(
    network: Network, way: Way, workers: int, nbytes: FloatArray
) -> list[tuple[str, FloatArray]]:
    """Each phase of a message sent this way, and what it would cost every bucket."""
    collective, compression = way
    phases = network.phases(collective, workers=workers, compression=compression)
    return [(phase, cost.seconds(nbytes)) for phase, cost in phases]

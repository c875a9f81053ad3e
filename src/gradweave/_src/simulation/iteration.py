"""One training step on paper: forward, backward, and the messages a plan sends."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from gradweave._src.checks import require_kind
from gradweave._src.costs.cost import FloatArray
from gradweave._src.network import Network
from gradweave._src.plan import Bucket, Plan
from gradweave._src.planning import OPERATIONS, priced_share
from gradweave._src.timeline import Span, Timeline
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import Operation


def simulate(
    trace: Trace,
    plan: Plan,
    network: Network,
    *,
    workers: int,
    operations: Sequence[Operation] | None = None,
    copy_s_per_byte: float = 0.0,
    idle_after_backward: bool = False,
) -> Timeline:
    """Predict one iteration, as the timeline that a worker would see.

    Each bucket leaves once its last tensor is ready and the bucket before it has left. It arrives
    the network's latency later; meanwhile the next one is on its way. For both passes this is an
    iteration in steady state: it begins with the all-gathers of what the one before has updated, in
    the order in which forward needs them, and forward waits for each of them.

    Args:
        trace: when gradients are ready.
        plan: which of them travel together.
        network: what messages cost.
        workers: how many workers there are.
        operations: what happens to gradients and, for both passes, to parameters, where that is
            something else, such as reduce and broadcast.
        copy_s_per_byte: what the worker's host takes to copy gradients: into their buckets, one
            after the other as they come, and out of them when backward is over and they have
            arrived, in the order of the buckets. On accelerators that is next to nothing.
        idle_after_backward: whether messages are priced as on idle workers from the moment on at
            which backward is over, where the network has such prices. Planners price a message
            without knowing when it is sent, so a plan's own prediction does not have this.

    Raises:
        PlanMismatch: if the plan is not one for the trace.
        UnknownCost: if the network cannot price a message.

    Examples:
        >>> trace, network = gradweave.load_trace("resnet50"), gradweave.load_network("k80-10gbe")
        >>> plan = gradweave.make_plan(trace, network, workers=16)
        >>> timeline = gradweave.simulate(trace, plan, network, workers=16)
        >>> timeline.compute_s < timeline.iteration_s
        True
    """
    require_kind(
        "simulate(trace, plan, network, …)",
        trace=(trace, Trace),
        plan=(plan, Plan),
        network=(network, Network),
    )
    plan.check_describes(trace)
    if copy_s_per_byte > 0 and workers > 1:
        trace = _copied_in(trace, copy_s_per_byte)
    of_gradients, *of_parameters = operations or OPERATIONS[plan.passes]
    gathers = [
        span
        for operation in of_parameters
        for span in _gathers(trace, plan, network, workers, operation)
    ]
    if plan.overlap:
        arrived_s = {name: span.end_s for span in gathers for name in span.tensors}
    else:
        last_s = max((span.end_s for span in gathers), default=0.0)
        arrived_s = {name: last_s for span in gathers for name in span.tensors}
    begin_s = _end_of_forward_s(trace, arrived_s)
    idle = network.while_idle() if idle_after_backward else network
    messages = list(
        _messages(trace, plan, network, workers, begin_s=begin_s, operation=of_gradients, idle=idle)
    )
    spans = [
        *_forward(trace, arrived_s),
        *_backward(trace, begin_s),
        *gathers,
        *messages,
    ]
    if copy_s_per_byte > 0:
        spans += _copied_out(messages, begin_s + trace.backward_s, copy_s_per_byte)
    return Timeline(spans=tuple(spans))


def _copied_in(trace: Trace, s_per_byte: float) -> Trace:
    """Let each gradient be ready when it is in its bucket; one is copied after the other."""
    tensors, free_s = [], 0.0
    for tensor in trace.tensors:
        free_s = max(free_s, tensor.ready_s) + s_per_byte * tensor.nbytes
        tensors.append(replace(tensor, ready_s=free_s))
    return replace(trace, tensors=tuple(tensors))


def _copied_out(
    messages: Sequence[Span], backward_end_s: float, s_per_byte: float
) -> Iterator[Span]:
    """Yield the copies out of buckets, one after the other.

    Each begins when backward and the bucket's last phase are over and the one before it is out.
    """
    arrived = {message.tensors: message for message in messages}
    now_s = backward_end_s
    for message in arrived.values():
        start_s = max(now_s, message.end_s)
        now_s = start_s + s_per_byte * message.nbytes
        yield Span(
            lane="communication",
            label=f"copy {message.label.rpartition(' ')[2]}",
            start_s=start_s,
            end_s=now_s,
            tensors=message.tensors,
            nbytes=message.nbytes,
        )


def _forward(trace: Trace, arrived_s: Mapping[str, float]) -> Iterator[Span]:
    now_s = 0.0
    for tensor in reversed(trace.tensors):
        now_s = max(now_s, arrived_s.get(tensor.name, 0.0))
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


def _end_of_forward_s(trace: Trace, arrived_s: Mapping[str, float]) -> float:
    if not arrived_s:
        return trace.forward_s
    computed_s = max((span.end_s for span in _forward(trace, arrived_s)), default=0.0)
    return max(computed_s, *arrived_s.values())


def _backward(trace: Trace, begin_s: float) -> Iterator[Span]:
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


def _gathers(
    trace: Trace, plan: Plan, network: Network, workers: int, operation: Operation
) -> Iterator[Span]:
    """Yield the all-gathers of an iteration, for which the last bucket of backward comes first."""
    if workers == 1:
        return
    free_s = 0.0
    nbytes = plan.bucket_bytes(trace)
    for number, bucket in reversed(list(enumerate(plan.buckets))):
        by = bucket.collective
        leave_s = free_s + network.seconds(operation, by, nbytes=nbytes[number], workers=workers)
        latency_s = network.latency_s(by, workers=workers, operation=operation)
        label, end_s = f"{operation} {number + 1}", leave_s + latency_s
        yield _message_span(bucket, label, start_s=free_s, end_s=end_s, nbytes=int(nbytes[number]))
        free_s = leave_s


def _messages(
    trace: Trace,
    plan: Plan,
    network: Network,
    workers: int,
    *,
    begin_s: float,
    operation: Operation,
    idle: Network,
) -> Iterator[Span]:
    """Yield gradients' messages.

    Backward begins at ``begin_s``; once it is over, messages cost what ``idle`` says.
    """
    if workers == 1:
        return
    free_s, computed_s = begin_s, begin_s + trace.backward_s
    nbytes = plan.bucket_bytes(trace)
    last_tensors = np.cumsum(plan.lengths) - 1
    priced_bytes = {
        travel: nbytes * priced_share(trace, travel.compression)
        for travel in {bucket.travel for bucket in plan.buckets}
    }

    def prices_on(known: Network) -> dict[Travel, list[tuple[str, FloatArray]]]:
        return {
            travel: _priced(known, operation, travel, workers, sizes)
            for travel, sizes in priced_bytes.items()
        }

    price = prices_on(network)
    idle_price = price if idle is network else prices_on(idle)
    latency_of_s = {
        travel: network.latency_s(
            travel.collective,
            workers=workers,
            operation=operation,
            compression=travel.compression,
        )
        for travel in price
    }
    for number, bucket in enumerate(plan.buckets):
        last = trace.tensors[last_tensors[number]] if plan.overlap else trace.tensors[-1]
        free_s = max(free_s, begin_s + last.ready_s)
        travel = bucket.travel
        phases = price[travel]
        for (phase, seconds), (_, idle_s) in zip(phases, idle_price[travel], strict=True):
            leave_s = _left_s(free_s, float(seconds[number]), computed_s, float(idle_s[number]))
            is_last = phase == phases[-1][0]
            latency_s = latency_of_s[travel] if is_last else 0.0
            label, end_s = f"{phase} {number + 1}", leave_s + latency_s
            yield _message_span(
                bucket, label, start_s=free_s, end_s=end_s, nbytes=int(nbytes[number])
            )
            free_s = leave_s


def _message_span(bucket: Bucket, label: str, *, start_s: float, end_s: float, nbytes: int) -> Span:
    return Span(
        lane="communication",
        label=label,
        start_s=start_s,
        end_s=end_s,
        tensors=bucket.tensors,
        nbytes=nbytes,
    )


def _left_s(start_s: float, busy_s: float, computed_s: float, idle_s: float) -> float:
    """Return when a message has left; its price changes when computing is over."""
    if busy_s == idle_s or start_s + busy_s <= computed_s:
        return start_s + busy_s
    if start_s >= computed_s:
        return start_s + idle_s
    missing = 1.0 - (computed_s - start_s) / busy_s
    return computed_s + missing * idle_s


def _priced(
    network: Network, operation: Operation, travel: Travel, workers: int, nbytes: FloatArray
) -> list[tuple[str, FloatArray]]:
    """Return each phase of a message that travels so, and what it would cost every bucket."""
    collective, compression = travel
    if operation != "all-reduce":
        cost = network.cost(operation, collective, workers=workers)
        return [(operation, cost.seconds(nbytes))]
    phases = network.phases(collective, workers=workers, compression=compression)
    return [(phase, cost.seconds(nbytes)) for phase, cost in phases]

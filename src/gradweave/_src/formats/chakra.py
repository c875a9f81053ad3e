"""A predicted iteration as a Chakra execution trace, which other simulators replay.

MLCommons' Chakra describes a rank's work as nodes that depend on each other (et_def.proto); a file
is a stream of messages, metadata first. ASTRA-sim, for one, replays it on networks of its own: it
takes the durations of computing from here and finds those of collectives by itself.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gradweave._src import files
from gradweave._src.errors import RequestError
from gradweave._src.formats.protobuf import (
    bytes_field,
    delimited,
    number_field,
    numbers_field,
    text_field,
)
from gradweave._src.plan import Plan
from gradweave._src.timeline import Span, Timeline
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import printable

VERSION = "0.0.4"  # of the schema, as Chakra's own generators write it
COMPUTES, COMMUNICATES = 4, 7  # COMP_NODE, COMM_COLL_NODE

# CollectiveCommType, by what our timelines call a message.
COLLECTIVES = {
    "all-reduce": 0,
    "reduce": 1,
    "push": 1,
    "all-gather": 2,
    "broadcast": 5,
    "pull": 5,
    "reduce-scatter": 7,
}
# A file for each rank, all alike; whoever simulates more has another way to say so.
MOST_RANKS = 4096


class Node(Struct, frozen=True, kw_only=True):
    """Something that a rank does, and what it waits for."""

    number: int  # from 1
    span: Span
    after: tuple[int, ...] = ()  # in its turn: what the same lane did before
    needs: tuple[int, ...] = ()  # whose results it uses
    collective: int | None = None
    wire_bytes: int = 0


def write_ranks(
    prefix: Path, trace: Trace, plan: Plan, timeline: Timeline, *, workers: int
) -> list[Path]:
    """Write PREFIX.0.et and so on, one for each rank, as Chakra's readers expect them."""
    if workers > MOST_RANKS:
        raise RequestError(
            f"a Chakra trace is a file for each rank; {workers} are more than {MOST_RANKS}"
        )
    content = encoded(nodes(trace, plan, timeline))
    paths = [prefix.with_name(f"{prefix.name}.{rank}.et") for rank in range(workers)]
    for path in paths:
        with files.replacing(path) as file:
            file.write(content)
    return paths


def nodes(trace: Trace, plan: Plan, timeline: Timeline) -> list[Node]:
    """Return the nodes in an order in which each comes after what it waits for."""
    return list(_nodes(trace, plan, timeline))


def _nodes(trace: Trace, plan: Plan, timeline: Timeline) -> Iterator[Node]:
    place = {tensor.name: number for number, tensor in enumerate(trace.tensors)}
    messages = [span for span in timeline.spans if span.lane == "communication"]
    forward = [span for span in timeline.spans if span.lane == "forward"]
    backward = [span for span in timeline.spans if span.lane == "backward"]
    gathers = [span for span in messages if _operation(span) == "all-gather"]
    number, computed, sent = 0, 0, 0  # 0: nothing yet
    arrived: dict[str, int] = {}
    for span in gathers:
        number += 1
        yield _message(number, span, plan, after=sent)
        sent = number
        arrived |= dict.fromkeys(span.tensors, number)
    last_gather = sent
    for span in forward:
        number += 1
        needed = arrived.get(span.tensors[0], 0) if plan.overlap else last_gather
        yield Node(number=number, span=span, after=_known(computed), needs=_known(needed))
        computed = number
    ready: list[tuple[int, int]] = []  # place of a tensor, and the node that ends with it
    for span in backward:
        number += 1
        yield Node(number=number, span=span, after=_known(computed), needs=_known(last_gather))
        computed = number
        ready.append((place[span.tensors[0]], number))
    for span in messages:
        if span in gathers:
            continue
        number += 1
        latest = place[span.tensors[-1]] if plan.overlap else len(place)
        needed = max((node for where, node in ready if where <= latest), default=0)
        yield _message(number, span, plan, after=sent, needed=needed)
        sent = number


def _message(number: int, span: Span, plan: Plan, *, after: int, needed: int = 0) -> Node:
    bucket = span.label.rpartition(" ")[2]
    compression = plan.buckets[int(bucket) - 1].compression
    share = 1.0 if compression is None else compression.wire_share
    return Node(
        number=number,
        span=span,
        after=_known(after),
        needs=_known(needed),
        collective=COLLECTIVES[_operation(span)],
        wire_bytes=round(span.nbytes * share),
    )


def _operation(span: Span) -> str:
    """Return the operation in a label such as ``bf16 all-reduce 3``: ``all-reduce``."""
    name = span.label.rpartition(" ")[0].rpartition(" ")[2]
    if name not in COLLECTIVES:
        raise RequestError(
            f"{printable(span.label)}: Chakra has no such collective; its traces know whole "
            "messages only, so leave --compression"
        )
    return name


def _known(number: int) -> tuple[int, ...]:
    return (number,) if number else ()


def encoded(found: Sequence[Node]) -> bytes:
    """Encode GlobalMetadata and then each Node, as et_def.proto numbers their fields."""
    metadata = text_field(1, VERSION)
    return b"".join([delimited(metadata), *(delimited(_node(node)) for node in found)])


def _node(node: Node) -> bytes:
    start_us, end_us = round(node.span.start_s * 1e6), round(node.span.end_s * 1e6)
    attributes = [_attribute("is_cpu_op", 27, 0)]  # bool_val
    if node.collective is not None:
        attributes.append(_attribute("comm_type", 9, node.collective))  # int64_val
        attributes.append(_attribute("comm_size", 9, node.wire_bytes))
    return b"".join(
        [
            number_field(1, node.number),
            text_field(2, f"{node.span.lane} {printable(node.span.label)}"),
            number_field(3, COMPUTES if node.collective is None else COMMUNICATES),
            numbers_field(4, node.after),
            numbers_field(5, node.needs),
            number_field(6, start_us),
            number_field(7, end_us - start_us),
            *(bytes_field(10, attribute) for attribute in attributes),
        ]
    )


def _attribute(name: str, field: int, value: int) -> bytes:
    return text_field(1, name) + number_field(field, value)

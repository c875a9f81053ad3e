"""What the page's scripts compute and draw with: a run as plain lists, small enough to embed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from gradweave.compression import WIRE_SHARES
from gradweave.costs import Link
from gradweave.errors import UnknownCost
from gradweave.network import Network
from gradweave.planning import is_compressible
from gradweave.report.folders import Folder
from gradweave.timeline import Span, Timeline
from gradweave.trace import Trace

# Times of spans are written to the nanosecond: shorter files, and no clock is better.
DIGITS = 9

# What is left of a gradient's bytes on the wire, where it may be rounded; fp16 is as wide as bf16.
WIRES = {"as it is": 1.0, "bf16": WIRE_SHARES["bf16"], "int8": WIRE_SHARES["int8"]}

Places = Mapping[str, int]  # of each tensor in backward order


class RingLink(Struct, frozen=True, kw_only=True):
    """The link that formulas compute with, and where it comes from, for people."""

    link: Link
    source: str


def ring_link(network: Network, workers: int) -> RingLink:
    """The network's own, or the one with which a ring would cost what was measured."""
    if network.links is not None:
        return RingLink(link=network.links.slowest(workers), source="measured between two workers")
    collective = network.default_collective
    line = network.cost("all-reduce", collective, workers=workers).line(float("inf"))
    rounds = max(1, 2 * (workers - 1))
    return RingLink(
        link=Link(latency_s=line.startup_s / rounds, s_per_byte=line.s_per_byte * workers / rounds),
        source=f"worked out from all-reduce by {collective}, as if it were a ring",
    )


def document(folders: Sequence[Folder]) -> dict[str, Any]:
    return {"runs": [_run(folder) for folder in folders], "wires": WIRES}


def _run(folder: Folder) -> dict[str, Any]:
    run, trace = folder.run, folder.run.trace
    places = {tensor.name: place for place, tensor in enumerate(trace.tensors)}
    computes: list[Any] = []  # runtimes share their predicted computing: it is the trace's
    names = dict.fromkeys(row.runtime for row in run.results.rows)
    return {
        "name": folder.name,
        "trace": trace.name,
        "workers": folder.workers,
        "link": _link(folder),
        "is_compressible": is_compressible(trace),
        "tensors": _tensors(trace),
        "runtimes": [
            {
                "name": name,
                "buckets": [_ranges(b.tensors, places) for b in run.plans[name].buckets],
                "ways": [
                    b.collective if b.compression is None else str(b.compression)
                    for b in run.plans[name].buckets
                ],
                "measured": _timeline(_first(run.measured.get(name)), places, computes),
                "predicted": _timeline(run.predicted.get(name), places, computes),
            }
            for name in names
        ],
        "computes": computes,
    }


def _tensors(trace: Trace) -> dict[str, Any]:
    """Exact, because the page's planner must find what ours finds."""
    return {
        "names": [tensor.name for tensor in trace.tensors],
        "bytes": [tensor.nbytes for tensor in trace.tensors],
        "ready_s": [tensor.ready_s for tensor in trace.tensors],
        "forward_s": [tensor.forward_s for tensor in trace.tensors],
    }


def _timeline(
    timeline: Timeline | None, places: Places, computes: list[Any]
) -> dict[str, Any] | None:
    """None where there is none: a training may not have noted, or not predicted, one."""
    if timeline is None:
        return None
    compute = {
        lane: [
            [*_times(span), places[span.tensors[0]] if span.tensors else None]
            for span in timeline.spans
            if span.lane == lane
        ]
        for lane in ("forward", "backward")
    }
    if compute not in computes:
        computes.append(compute)
    return {
        "compute": computes.index(compute),
        "messages": [
            [*_times(span), span.nbytes, span.label, _ranges(span.tensors, places)]
            for span in timeline.spans
            if span.lane == "communication"
        ],
    }


def _first(timelines: Sequence[Timeline] | None) -> Timeline | None:
    return timelines[0] if timelines else None


def known_link(folder: Folder) -> RingLink | None:
    """What formulas compute with; None where nobody knows what an all-reduce costs."""
    network = folder.run.network
    if network is None:
        return None
    try:
        return ring_link(network, folder.workers)
    except UnknownCost:
        return None


def _link(folder: Folder) -> dict[str, Any] | None:
    known = known_link(folder)
    return None if known is None else asdict(known.link)


def _times(span: Span) -> tuple[float, float]:
    return round(span.start_s, DIGITS), round(span.end_s, DIGITS)


def _ranges(names: Iterable[str], places: Places) -> list[int]:
    """First place and count, again and again: the tensors of a bucket are mostly neighbours."""
    ranges: list[int] = []
    for place in sorted(places[name] for name in names):
        if ranges and place == ranges[-2] + ranges[-1]:
            ranges[-1] += 1
        else:
            ranges += [place, 1]
    return ranges

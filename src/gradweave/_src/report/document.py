"""What the page's scripts compute and draw with: a run as plain lists, small enough to embed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradweave._src.compression import WIRE_SHARES
from gradweave._src.costs import Line
from gradweave._src.plan import Plan
from gradweave._src.planning import is_compressible
from gradweave._src.report.folders import Folder
from gradweave._src.report.pricing import known_price, ring_link
from gradweave._src.report.runtimes import rows_in_order
from gradweave._src.runs import Run
from gradweave._src.timeline import Lane, Span, Timeline
from gradweave._src.trace import Trace

# Times of spans are written to the nanosecond: shorter files, and no clock is better.
DIGITS = 9

# Shares of a gradient's bytes on the wire, by what it may be rounded to; fp16 is as wide as bf16.
WIRES = {"as it is": 1.0, "bf16": WIRE_SHARES["bf16"], "int8": WIRE_SHARES["int8"]}

# A rank's strip is a few hundred pixels wide, so pauses of a smaller share of it are not seen.
SHORTEST_PAUSE = 1 / 2000

LANES: tuple[Lane, ...] = ("forward", "backward", "communication")

Places = Mapping[str, int]  # of each tensor in backward order


def document(folders: Sequence[Folder]) -> dict[str, Any]:
    return {"runs": [_run(folder) for folder in folders], "wires": WIRES}


def _run(folder: Folder) -> dict[str, Any]:
    run, trace = folder.run, folder.run.trace
    places = {tensor.name: place for place, tensor in enumerate(trace.tensors)}
    computes: list[Any] = []  # runtimes share their predicted computing: it is the trace's
    return {
        "name": folder.name,
        "trace": trace.name,
        "workers": folder.workers,
        "price": _price(folder),
        "is_compressible": is_compressible(trace),
        "tensors": _tensors(trace),
        "runtimes": [_runtime(row.runtime, run, places, computes) for row in rows_in_order(run)],
        "computes": computes,
    }


def _price(folder: Folder) -> dict[str, Any] | None:
    """Return what messages cost among the workers of the run; None where nobody knows."""
    network, price = folder.run.network, known_price(folder)
    if network is None or price is None:
        return None
    cost = price.cost
    return {
        "collective": price.collective,
        "workers": price.workers,
        "latency_s": price.latency_s,
        "startup_s": price.startup_s,
        "link_s_per_byte": ring_link(network, folder.workers).s_per_byte,
        "cost": {"startup_s": cost.startup_s, "s_per_byte": cost.s_per_byte}
        if isinstance(cost, Line)
        else {"bytes": cost.nbytes, "seconds": cost.measured_s},
    }


def _runtime(name: str, run: Run, places: Places, computes: list[Any]) -> dict[str, Any]:
    """Return a runtime's data without what a run lacks: a plan, or a timeline of either kind."""
    predicted, ranks = run.predicted.get(name), run.measured.get(name, ())
    buckets = _buckets(run.plans.get(name), ranks)
    return {
        "name": name,
        "buckets": [_ranges(tensors, places) for tensors, _ in buckets],
        "ways": [way for _, way in buckets],
        "measured": _timeline(ranks[0], places, computes) if ranks else None,
        "predicted": None if predicted is None else _timeline(predicted, places, computes),
        "ranks": [_strip(timeline) for timeline in ranks] if len(ranks) > 1 else [],
    }


def _buckets(plan: Plan | None, ranks: Sequence[Timeline]) -> list[tuple[tuple[str, ...], str]]:
    """Return tensors that travel together, and how; without a plan, as torch was seen to send."""
    if plan is None:
        return [(span.tensors, "native") for one in ranks[:1] for span in _sent(one)]
    return [
        (b.tensors, b.collective if b.compression is None else str(b.compression))
        for b in plan.buckets
    ]


def _sent(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.lane == "communication"]


def _tensors(trace: Trace) -> dict[str, Any]:
    """Return the tensors with exact numbers: the page's planner must find what ours finds."""
    return {
        "names": [tensor.name for tensor in trace.tensors],
        "bytes": [tensor.nbytes for tensor in trace.tensors],
        "ready_s": [tensor.ready_s for tensor in trace.tensors],
        "forward_s": [tensor.forward_s for tensor in trace.tensors],
    }


def _timeline(timeline: Timeline, places: Places, computes: list[Any]) -> dict[str, Any]:
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
            for span in _sent(timeline)
        ],
    }


def _strip(timeline: Timeline) -> list[list[float]]:
    """Return begins and ends of a rank's time in forward, in backward and on the network."""
    pause_s = SHORTEST_PAUSE * timeline.iteration_s
    return [_busy(timeline, lane, pause_s) for lane in LANES]


def _busy(timeline: Timeline, lane: Lane, pause_s: float) -> list[float]:
    busy: list[float] = []
    for start_s, end_s in sorted(_times(span) for span in timeline.spans if span.lane == lane):
        if busy and start_s <= busy[-1] + pause_s:
            busy[-1] = max(busy[-1], end_s)
        else:
            busy += [start_s, end_s]
    return busy


def _times(span: Span) -> tuple[float, float]:
    return round(span.start_s, DIGITS), round(span.end_s, DIGITS)


def _ranges(names: Iterable[str], places: Places) -> list[int]:
    """Return first places and counts by turns, for tensors of a bucket are mostly neighbours."""
    ranges: list[int] = []
    for place in sorted(places[name] for name in names):
        if ranges and place == ranges[-2] + ranges[-1]:
            ranges[-1] += 1
        else:
            ranges += [place, 1]
    return ranges

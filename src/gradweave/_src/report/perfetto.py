"""Timelines as Chrome's trace events, which Perfetto opens.

Every rank of every runtime is a process, and so is its prediction. Each message leaves an arrow
from where its last gradient was ready, through where it was sent, to where it was done.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from gradweave._src.report.folders import Folder
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import all_printable

Event = dict[str, Any]

COMPUTE, READY, COMMUNICATION, DONE = 1, 2, 3, 4
THREADS = {
    COMPUTE: "computing",
    READY: "gradients ready",
    COMMUNICATION: "communication",
    DONE: "done",
}

# Note: one after the other
# Slices of one thread must not overlap by halves, or viewers drop them; and an arrow needs a slice
# that is long enough to be seen. So a slice begins when the one before it has ended, and lasts a
# microsecond at least. Its arguments have the times as they were.
SHORTEST_US = 1.0


def trace_events(folders: Sequence[Folder]) -> str:
    processes, flows = count(1), count(1)
    events: list[Event] = []
    for folder in folders:
        run = folder.run
        for name in dict.fromkeys(row.runtime for row in run.results.rows):
            timelines = {
                f"measured, rank {rank}": timeline
                for rank, timeline in enumerate(run.measured.get(name, ()))
            }
            if name in run.predicted:
                timelines["predicted, every rank"] = run.predicted[name]
            for what, timeline in timelines.items():
                pid = next(processes)
                ready_s = None if what.startswith("measured") else _ready_s(run.trace, timeline)
                events += _named(pid, f"{folder.name}: {name}, {what}")
                events += _computing(pid, timeline)
                events += _messages(pid, timeline, ready_s, flows)
    shown = all_printable(events)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": shown}, ensure_ascii=False)


def _ready_s(trace: Trace, timeline: Timeline) -> dict[str, float]:
    """Return when each tensor was ready in this timeline.

    Forward may have waited for parameters, so backward begins where its first span does.
    """
    backward = (span.start_s for span in timeline.spans if span.lane == "backward")
    begin_s = min(backward, default=trace.forward_s)
    return {tensor.name: begin_s + tensor.ready_s for tensor in trace.tensors}


def _named(pid: int, title: str) -> Iterator[Event]:
    yield _metadata(pid, 0, "process_name", name=title)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    for tid, name in THREADS.items():
        yield _metadata(pid, tid, "thread_name", name=name)
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)


def _metadata(pid: int, tid: int, kind: str, **args: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": args}


def _computing(pid: int, timeline: Timeline) -> Iterator[Event]:
    for span in timeline.spans:
        if span.lane != "communication":
            times_us = _us(span.start_s), _us(span.end_s)
            yield _slice(pid, COMPUTE, times_us, span.label)


def _messages(
    pid: int, timeline: Timeline, ready_s: dict[str, float] | None, flows: Iterator[int]
) -> Iterator[Event]:
    """Yield the events of all messages.

    Without ready times a message was sent as soon as it was ready, as torch's hooks see it.
    """
    free_us = dict.fromkeys(THREADS, 0.0)
    sent = [span for span in timeline.spans if span.lane == "communication"]
    for span in sorted(sent, key=lambda span: span.end_s):
        sent_us, done_us = _us(span.start_s), _us(span.end_s)
        ready_us = sent_us
        if ready_s is not None:
            ready_us = min(sent_us, _us(max(ready_s[name] for name in span.tensors)))
        times = {"ready_us": ready_us, "sent_us": sent_us, "done_us": done_us}
        whole = times | {"bytes": span.nbytes, "tensors": list(span.tensors)}
        flow = next(flows)
        steps = (
            ("s", READY, (ready_us, ready_us)),
            ("t", COMMUNICATION, (sent_us, done_us)),
            ("f", DONE, (done_us, done_us)),
        )
        for phase, tid, (start_us, end_us) in steps:
            at_us = max(start_us, free_us[tid])  # see Note: one after the other
            free_us[tid] = round(max(end_us, at_us + SHORTEST_US), 3)
            args = whole if tid == COMMUNICATION else times
            yield _slice(pid, tid, (at_us, free_us[tid]), span.label, **args)
            yield _flow(pid, tid, phase, at_us, flow)


def _slice(pid: int, tid: int, times_us: tuple[float, float], name: str, **args: Any) -> Event:
    start_us, end_us = times_us
    event = {"ph": "X", "pid": pid, "tid": tid, "ts": start_us, "dur": round(end_us - start_us, 3)}
    return event | {"name": name, "cat": THREADS[tid], "args": args}


def _flow(pid: int, tid: int, phase: str, at_us: float, flow: int) -> Event:
    event: Event = {"ph": phase, "pid": pid, "tid": tid, "ts": at_us, "id": flow}
    event |= {"name": "message", "cat": "message"}
    return event if phase == "s" else event | {"bp": "e"}  # binds it to the slice that begins here


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

"""Chrome's trace events: named processes, slices in microseconds, arrows that begin and end."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from report_cases import RUNTIMES, drawn_trace, measured_network, write_run

from gradweave._src.report.folders import read_folders
from gradweave._src.report.perfetto import trace_events


@pytest.fixture(scope="module")
def folder(small_run):
    (folder,) = read_folders([small_run])
    return folder


@pytest.fixture(scope="module")
def events(folder):
    return json.loads(trace_events([folder]))["traceEvents"]


def of_phase(events, *phases):
    return [event for event in events if event["ph"] in phases]


def test_one_process_for_each_timeline(events):
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(titles.values()) == [
        f"small: {runtime}, {what}"
        for runtime in RUNTIMES
        for what in ("measured, rank 0", "measured, rank 1", "predicted, every rank")
    ]


def test_times_are_microseconds(folder, events):
    slices = [e for e in of_phase(events, "X") if e["pid"] == 1 and e["cat"] == "communication"]
    (measured, _) = folder.run.measured["torch-ddp"]
    sent = sorted(
        (span for span in measured.spans if span.lane == "communication"),
        key=lambda span: span.end_s,
    )
    assert [event["args"]["tensors"] for event in slices] == [list(s.tensors) for s in sent]
    for event, span in zip(slices, sent, strict=True):
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * span.end_s, abs=0.01)
        assert event["args"]["sent_us"] == pytest.approx(1e6 * span.start_s, abs=0.01)
        assert event["args"]["bytes"] == span.nbytes


def test_arrows_go_from_ready_to_sent_to_done(events):
    arrows = defaultdict(list)
    for event in of_phase(events, "s", "t", "f"):
        arrows[event["id"]].append(event)
    slices = {(e["pid"], e["tid"], e["ts"]) for e in of_phase(events, "X")}
    assert arrows
    for steps in arrows.values():
        assert [step["ph"] for step in steps] == ["s", "t", "f"]
        assert len({step["pid"] for step in steps}) == 1
        for step in steps:
            assert (step["pid"], step["tid"], step["ts"]) in slices, "an arrow needs a slice"


def test_slices_of_a_thread_do_not_overlap(events):
    lanes = defaultdict(list)
    for event in of_phase(events, "X"):
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort()
        for (_, end), (start, _) in pairwise(lane):
            assert start >= end - 1e-3


def test_gradients_are_ready_before_they_are_sent(folder, events):
    begin_s = folder.run.trace.forward_s
    ready_s = {t.name: begin_s + t.ready_s for t in folder.run.trace.tensors}
    for event in of_phase(events, "X"):
        if event["cat"] == "communication" and event["pid"] % 3 == 0:
            args = event["args"]
            expected_s = max(ready_s[name] for name in args["tensors"])
            assert args["ready_us"] == pytest.approx(1e6 * expected_s, abs=0.01)
            assert args["ready_us"] <= args["sent_us"] <= args["done_us"]


def test_forward_may_wait_for_parameters(tmp_path):
    """Gradients are then ready later than the trace says; parameters leave when they are sent."""
    path = write_run(
        tmp_path / "run", drawn_trace(20), measured_network(), runtimes={"sharded": "optimal"}
    )
    (folder,) = read_folders([path])
    events = json.loads(trace_events([folder]))["traceEvents"]
    sent = [e for e in of_phase(events, "X") if e["cat"] == "communication" and e["pid"] == 3]
    timeline = folder.run.predicted["sharded"]
    begin_s = min(span.start_s for span in timeline.spans if span.lane == "backward")
    assert begin_s > folder.run.trace.forward_s
    ready_s = {t.name: begin_s + t.ready_s for t in folder.run.trace.tensors}
    for event in sent:
        args = event["args"]
        expected_us = 1e6 * max(ready_s[name] for name in args["tensors"])
        if event["name"].startswith("all-gather"):
            expected_us = args["sent_us"]
        assert args["ready_us"] == pytest.approx(expected_us, abs=0.01)
    assert {event["name"].rsplit(" ", 1)[0] for event in sent} == {"all-gather", "reduce-scatter"}

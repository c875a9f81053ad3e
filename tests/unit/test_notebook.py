"""How values show themselves: in one line, in a notebook, and as rows for a data frame."""

import re
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from gradweave import (
    Bucket,
    CollectiveCost,
    Curve,
    Line,
    Network,
    Plan,
    Span,
    Timeline,
    load_network,
    load_trace,
    make_plan,
    simulate,
)
from gradweave._src import files, notebook
from gradweave._src.compression import Compression

EVIL = "<script>alert('&')</script>\"x"


@pytest.fixture(scope="module")
def values():
    """One of each kind, in which every name wants to be a script."""
    trace = load_trace("alexnet")
    first, *others = trace.tensors
    trace = replace(trace, name=EVIL, tensors=(replace(first, name=EVIL), *others))
    network = replace(load_network("k80-10gbe"), name=EVIL)
    plan = replace(make_plan(trace, network, workers=4), planner=EVIL)
    timeline = simulate(trace, plan, network, workers=4)
    return {"trace": trace, "network": network, "plan": plan, "timeline": timeline}


def test_a_trace_in_one_line():
    trace = load_trace("resnet50").rescaled(forward_s=0.15, backward_s=0.3)
    assert repr(trace) == (
        "Trace('resnet50', 161 gradients, 102.2 MB, forward 150.0 ms, backward 300.0 ms)"
    )


def test_small_things_have_small_units(small_trace):
    assert repr(small_trace) == (
        "Trace('small', 3 gradients, 1.4 KB, forward 2,000.0 ms, backward 3,000.0 ms)"
    )
    assert repr(replace(small_trace, tensors=small_trace.tensors[:1])).startswith(
        "Trace('small', 1 gradient, 400 B, "
    )


def test_a_network_in_one_line(linked_network):
    assert repr(linked_network) == "Network('linked', links of 250.0 ms and 1.0 KB/s)"
    assert repr(load_network("k80-10gbe")) == "Network('k80-10gbe', links of 45.2 us and 1.0 GB/s)"
    assert repr(load_network("mpi-10gbe-measured")) == (
        "Network('mpi-10gbe-measured', native with 2, 4, 8 workers)"
    )


def test_a_plan_in_one_line():
    buckets = (
        Bucket(tensors=("a", "b"), collective="native"),
        Bucket(tensors=("c",), collective="ring", compression=Compression(method="bf16")),
        Bucket(tensors=("d",), collective="native"),
    )
    assert repr(Plan(planner="mine", buckets=buckets)) == (
        "Plan('mine', 4 gradients in 3 messages by native, ring+bf16, beside backward)"
    )
    assert repr(Plan(planner="naive", buckets=buckets[:1], overlap=False)) == (
        "Plan('naive', 2 gradients in 1 message by native, after backward)"
    )
    assert repr(Plan(planner="mine", buckets=buckets[:1], passes="both")).endswith(
        "by native, beside both passes)"
    )


def spans():
    return (
        Span(lane="forward", label="f", start_s=0.0, end_s=0.1, tensors=("a",)),
        Span(lane="backward", label="b", start_s=0.1, end_s=0.3, tensors=("a",)),
        Span(
            lane="communication",
            label="all-reduce 1",
            start_s=0.25,
            end_s=0.4,
            tensors=("a",),
            nbytes=400,
        ),
    )


def test_a_timeline_in_one_line():
    assert repr(Timeline(spans=spans())) == (
        "Timeline(400.0 ms: 300.0 ms computing, 100.0 ms waiting for 1 message)"
    )


def test_a_timeline_as_a_chart():
    """Where bars stand is when things happened: forward is the first quarter of the time."""
    html = Timeline(spans=spans())._repr_html_()
    svg = ET.fromstring(re.search(r"<svg.*</svg>", html)[0])  # noqa: S314 our own
    places = [
        (float(bar.get("x")), float(bar.get("width")), bar[0].text)
        for bar in svg
        if bar.tag.endswith("rect")
    ]
    left, width = notebook.LEFT, notebook.WIDTH - notebook.LEFT
    assert places == [
        (left, width / 4, "f: 0.0 ms to 100.0 ms"),
        (left + width / 4, width / 2, "b: 100.0 ms to 300.0 ms"),
        (left + width * 5 / 8, width * 3 / 8, "all-reduce 1: 250.0 ms to 400.0 ms"),
    ]
    texts = [text.text for text in svg if text.tag.endswith("text")]
    assert texts == [
        *["forward", "backward", "communication"],
        *[f"{tick} ms" for tick in (0, 50, 100, 150, 200, 250, 300, 350, 400)],
    ]


@pytest.mark.parametrize("kind", ["trace", "network", "plan", "timeline"])
def test_text_is_escaped_and_markup_is_whole(values, kind):
    html = values[kind]._repr_html_()
    assert "<script" not in html
    document = ET.fromstring(html)  # noqa: S314 ours
    assert repr(values[kind]) in "".join(document.itertext())


def test_long_tables_show_their_ends():
    trace = load_trace("resnet50")
    document = ET.fromstring(trace._repr_html_())  # noqa: S314 ours
    rows = ["".join(row.itertext()) for row in document.iter("tr")]
    assert len(rows) == 1 + 12 + 1
    assert rows[7] == "… 149 more"
    assert trace.tensors[-1].name in rows[-1]


def test_columns_without_a_value_are_left_out(linked_network):
    document = ET.fromstring(linked_network._repr_html_())  # noqa: S314 ours
    assert [cell.text for cell in document.iter("th")] == ["kind", "startup_s", "s_per_byte"]
    assert [cell.text for cell in document.iter("td")] == ["link", "0.25", "0.001"]


def test_rows_of_a_trace(small_trace):
    assert small_trace.rows() == [
        {"tensor": "c", "elements": 100, "nbytes": 400, "ready_s": 1.0, "forward_s": 0.5},
        {"tensor": "b", "elements": 1, "nbytes": 4, "ready_s": 1.0, "forward_s": 0.0},
        {"tensor": "a", "elements": 250, "nbytes": 1000, "ready_s": 3.0, "forward_s": 1.5},
    ]


def test_rows_of_a_plan_and_a_timeline(small_trace, linked_network):
    plan = make_plan(small_trace, linked_network, workers=2, planner="wfbp", compression="topk:0.5")
    assert plan.rows()[1] == {
        "message": 2,
        "tensors": 1,
        "first_tensor": "b",
        "last_tensor": "b",
        "collective": "ring",
        "compression": "topk:0.5",
    }
    timeline = Timeline(spans=spans())
    assert timeline.rows()[2] == {
        "lane": "communication",
        "label": "all-reduce 1",
        "start_s": 0.25,
        "end_s": 0.4,
        "nbytes": 400,
        "tensors": 1,
    }


def cost(collective, of):
    return CollectiveCost(operation="all-reduce", collective=collective, workers=4, cost=of)


def test_rows_of_a_network(linked_network):
    curve = Curve(nbytes=(10, 20), measured_s=(1.0, 2.0))
    line = Line(startup_s=0.5, s_per_byte=0.25)
    network = replace(linked_network, costs=(cost("native", curve), cost("ring", line)))
    rows = network.rows()
    assert [row["kind"] for row in rows] == ["point", "point", "line", "link"]
    assert len({tuple(row) for row in rows}) == 1, "a data frame wants the same columns"
    assert (rows[1]["collective"], rows[1]["nbytes"], rows[1]["seconds"]) == ("native", 20, 2.0)
    assert (rows[2]["startup_s"], rows[2]["s_per_byte"]) == (0.5, 0.25)
    assert (rows[3]["startup_s"], rows[3]["workers"]) == (0.25, None)
    assert isinstance(network, Network)


def test_showing_changes_no_file(values):
    """Nor equality: a value that was read is the value that was written."""
    for value in values.values():
        again = files.loads(files.dumps(value), type(value), origin="here")
        assert again == value
        assert hash(again) == hash(value)

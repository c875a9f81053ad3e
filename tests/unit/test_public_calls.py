"""Mistakes in calls of the public functions: swapped arguments, texts for values."""

from pathlib import Path

import pytest

from gradweave import (
    Bucket,
    CollectiveCost,
    Compression,
    Curve,
    Level,
    Line,
    Link,
    Links,
    Network,
    Plan,
    RequestError,
    Span,
    Tensor,
    Timeline,
    Trace,
    load_network,
    load_trace,
    make_plan,
    read,
    simulate,
    write,
)


@pytest.fixture(scope="module")
def values():
    trace, network = load_trace("alexnet"), load_network("k80-10gbe")
    return trace, network, make_plan(trace, network, workers=4)


def test_swapped_arguments_of_make_plan(values):
    trace, network, _ = values
    complaint = r"^make_plan\(trace, network, …\): trace must be a Trace, got a Network$"
    with pytest.raises(RequestError, match=complaint):
        make_plan(network, trace, workers=4)


def test_names_instead_of_values(values):
    trace, network, _ = values
    complaint = r"trace must be a Trace, got a str; gradweave\.load_trace\('alexnet'\) makes one$"
    with pytest.raises(RequestError, match=complaint):
        make_plan("alexnet", network, workers=4)
    with pytest.raises(RequestError, match=r"gradweave\.load_network\('k80-10gbe'\) makes one$"):
        make_plan(trace, "k80-10gbe", workers=4)


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ((2, 0, 1), "trace must be a Trace, got a Plan"),
        ((0, 1, 2), "plan must be a Plan, got a Network"),
        ((0, 2, 2), "network must be a Network, got a Plan"),
    ],
)
def test_swapped_arguments_of_simulate(values, order, complaint):
    with pytest.raises(RequestError, match=complaint):
        simulate(*(values[place] for place in order), workers=4)


def test_swapped_arguments_of_files(values, tmp_path):
    trace = values[0]
    path = tmp_path / "trace.json"
    with pytest.raises(RequestError, match=r"^write\(path, value\): value must be one of Trace"):
        write(trace, str(path))
    write(path, trace)
    assert read(path, type(trace)) == trace
    with pytest.raises(RequestError, match=r"^read\(path, kind\): kind must be one of Trace"):
        read(path, "trace")


def test_a_compression_may_be_text(values):
    trace, network, _ = values
    as_text = make_plan(trace, network, workers=4, compression="gtopk:0.001")
    as_value = Compression(method="gtopk", density=0.001)
    assert as_text == make_plan(trace, network, workers=4, compression=as_value)
    assert make_plan(trace, network, workers=4, compression="bf16").buckets[0].compression == (
        Compression(method="bf16")
    )


@pytest.mark.parametrize(
    ("compression", "complaint"),
    [
        ("gtopq", r"no compression 'gtopq', did you mean gtopk\?"),
        (0.001, "must be a Compression or a text such as 'gtopk:0.001', got a float"),
    ],
)
def test_compressions_that_mean_nothing(values, compression, complaint):
    trace, network, _ = values
    with pytest.raises(RequestError, match=complaint):
        make_plan(trace, network, workers=4, compression=compression)


def test_a_path_in_place_of_a_text(values, tmp_path):
    trace, network, _ = values
    write(tmp_path / "trace.json", trace)
    write(tmp_path / "network.json", network)
    assert load_trace(tmp_path / "trace.json") == trace
    assert load_network(tmp_path / "network.json") == network
    with pytest.raises(RequestError, match=r"^no file and no shipped trace '/nowhere/resnet50'"):
        load_trace(Path("/nowhere/resnet50"))


LINK = Link(latency_s=0.0, s_per_byte=0.0)
BUCKET = Bucket(tensors=("a",), collective="native")
SPAN = {"label": "", "start_s": 0.0, "end_s": 1.0, "tensors": ()}
COST = {
    "operation": "all-reduce",
    "collective": "ring",
    "workers": 2,
    "cost": Line(startup_s=0.0, s_per_byte=0.0),
}
TENSOR = {"name": "a", "elements": 6, "bytes_per_element": 4, "ready_s": 1.0, "forward_s": 0.0}
TRACE = {"name": "a", "origin": "measured", "source": "made up", "batch_size": 1}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Compression(method="foo"), "^no compression 'foo'; there are bf16"),
        (lambda: Compression(method="bf 16"), "^no compression 'bf 16', did you mean bf16"),
        (
            lambda: Plan(planner="mine", buckets=(BUCKET,), passes="sideways"),
            "^passes must be one of backward, both, got 'sideways'$",
        ),
        (
            lambda: CollectiveCost(**{**COST, "operation": "nonsense"}),
            "^operation must be one of all-reduce, broadcast, .*, got 'nonsense'$",
        ),
        (
            lambda: CollectiveCost(**COST, beside="foo"),
            "^beside must be one of nothing, compute, got 'foo'$",
        ),
        (
            lambda: Links(levels=(Level(members=None, link=LINK),), topology="moebius"),
            "^topology must be one of fat-tree, torus, got 'moebius'$",
        ),
        (
            lambda: Span(lane="sideways", **SPAN),
            "^lane must be one of forward, backward, communication, got 'sideways'$",
        ),
        (
            lambda: Trace(**{**TRACE, "origin": "guessed"}, tensors=(Tensor(**TENSOR),)),
            "^'a': origin must be one of measured, estimated, got 'guessed'$",
        ),
        # Each of these was a ValueError without a class of ours.
        (lambda: Compression(method="topk", density=2.0), "density must be above 0"),
        (lambda: Plan(planner="mine", buckets=()), "buckets must not be empty"),
        (lambda: Bucket(tensors=(), collective="ring"), "tensors must not be empty"),
        (lambda: Network(name="a", source="made up"), "costs and links are both missing"),
        (lambda: CollectiveCost(**{**COST, "workers": 1}), "workers must be at least 2"),
        (lambda: CollectiveCost(**{**COST, "collective": "ring+x"}), "^collective: "),
        (lambda: Links(levels=()), "levels must not be empty"),
        (lambda: Curve(nbytes=(1, 1), measured_s=(1.0, 1.0)), "nbytes must increase"),
        (lambda: Timeline(spans=()), "spans must not be empty"),
        (lambda: Span(lane="forward", **{**SPAN, "end_s": 0.0, "start_s": 1.0}), "end_s must not"),
        (lambda: Tensor(**TENSOR, shape=(5,)), r"shape \[5\] has 5 elements, not 6"),
        (lambda: Trace(**TRACE, tensors=()), "tensors must not be empty"),
    ],
)
def test_values_that_mean_nothing(make, complaint):
    with pytest.raises(RequestError, match=complaint):
        make()


def test_what_rounds_has_no_exchange():
    assert Compression(method="bf16").exchange is None
    assert Compression(method="gtopk", density=0.5).exchange == "gtopk"


def test_no_workers_to_plan_for(values):
    trace, network, _ = values
    with pytest.raises(RequestError, match="workers must be at least 1, got 0"):
        make_plan(trace, network, workers=0)

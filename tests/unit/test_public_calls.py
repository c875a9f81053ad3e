"""Mistakes in calls of the public functions: swapped arguments, texts for values."""

import pytest

from gradweave import (
    Compression,
    RequestError,
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

"""Merging and ways decided together: no plan at all is better, whatever it merges and mixes."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from strategies import all_mergings, costs, traces

from gradweave import CollectiveCost, Compression, Network, load_network, load_trace, simulate
from gradweave._src.costs import Line
from gradweave._src.plan import merge
from gradweave._src.planning.joint import plan_among
from gradweave._src.travel import Travel

NATIVE, BF16, INT8 = (
    Travel("native"),
    Travel("ring", Compression(method="bf16")),
    Travel("ring", Compression(method="int8")),
)
WAYS = (NATIVE, BF16, INT8)


def network_of(costs_of):
    return Network(
        name="drawn",
        source="drawn",
        costs=tuple(
            CollectiveCost(operation="all-reduce", collective=str(way), workers=4, cost=cost)
            for way, cost in costs_of.items()
        ),
    )


def all_plans(trace, ways):
    for lengths in all_mergings(len(trace.tensors)):
        merged = merge(trace, lengths, planner="drawn", collective="native")
        for chosen in product(ways, repeat=len(lengths)):
            yield replace(
                merged,
                buckets=tuple(
                    replace(bucket, collective=way.collective, compression=way.compression)
                    for bucket, way in zip(merged.buckets, chosen, strict=True)
                ),
            )


@given(trace=traces(most=4), of_ways=st.tuples(costs, costs, costs))
def test_no_merging_and_no_choice_of_ways_ends_earlier(trace, of_ways):
    trace = trace.with_bytes_per_element(4)
    network = network_of(dict(zip(WAYS, of_ways, strict=True)))
    plan = plan_among(trace, network, WAYS, workers=4, planner="optimal:0")
    best_s = min(
        simulate(trace, one, network, workers=4).iteration_s for one in all_plans(trace, WAYS)
    )
    assert simulate(trace, plan, network, workers=4).iteration_s == pytest.approx(best_s)


def test_a_handicapped_way_must_be_cheaper_by_that_much(small_trace):
    trace = small_trace.with_bytes_per_element(4)
    dear, cheap = Line(startup_s=1.0, s_per_byte=0.0), Line(startup_s=0.95, s_per_byte=0.0)
    network = network_of({NATIVE: dear, BF16: cheap})

    def way(handicap):
        plan = plan_among(
            trace, network, (NATIVE, BF16), workers=4, planner="single", handicap=handicap
        )
        (bucket,) = plan.buckets
        return Travel(bucket.collective, bucket.compression)

    assert way(0.0) == BF16
    assert way(0.1) == NATIVE


def test_small_messages_stay_as_they_are_and_large_ones_are_rounded():
    """A way with a dearer start-up and cheaper bytes is for large messages only."""
    trace = load_trace("gpt2")
    network = network_of(
        {
            NATIVE: Line(startup_s=1e-4, s_per_byte=1e-9),
            INT8: Line(startup_s=1e-2, s_per_byte=0.3e-9),
        }
    )
    plan = plan_among(trace, network, (NATIVE, INT8), workers=4, planner="wfbp")
    nbytes = plan.bucket_bytes(trace)
    rounded = np.array([bucket.compression is not None for bucket in plan.buckets])
    assert nbytes[~rounded].max() < nbytes[rounded].min()
    assert 0 < rounded.sum() < len(rounded)


def test_gradients_of_two_bytes_are_not_rounded():
    trace, network = load_trace("llama-1b"), load_network("k80-10gbe")
    plan = plan_among(trace, network, (Travel("ring"), BF16), workers=4)
    assert {bucket.compression for bucket in plan.buckets} == {None}

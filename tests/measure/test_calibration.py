"""Calibrating real groups of threads: what comes out is whole, alike on all ranks, and usable."""

from contextlib import nullcontext
from itertools import pairwise
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_threads

from gradweave import CollectiveCost, Compression, Curve, RequestError, make_plan
from gradweave._src import files
from gradweave._src.collectives import ways
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.lanes import Lanes
from gradweave._src.costs import Links
from gradweave._src.measure.load import computing
from gradweave._src.measure.network import (
    calibrate,
    gaps_of,
    measure_network,
    never_cheaper,
    sample_of,
    send_in_turn,
)
from gradweave._src.network import Network
from gradweave._src.vocabulary import Way

# Where it is not about the times.
SHORTEST = {"repeats": 1, "largest_bytes": 8 * 1024}


def calibrated(group, options):
    advanced = []
    network = measure_network(group, name="here", advance=lambda: advanced.append(1), **options)
    return files.dumps(network), len(advanced)


def on_lanes(group, other, options):
    return calibrated(group, {"other_lanes": [Communicator(other)], **options})


def on_ranks(world, *, lanes=1, **options):
    options = {"repeats": 2, "largest_bytes": 16 * 1024, **options}
    dumped = on_threads(world, calibrated if lanes == 1 else on_lanes, options, groups=lanes)
    assert len(set(dumped)) == 1, "ranks differ"
    text, advanced = dumped[0]
    assert advanced >= 3
    return files.loads(text, Network, origin="rank 0")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_ranks_measure_the_same(world, small_trace):
    network = on_ranks(world, ways=ways(["all-reduce"], ["native", "ring"]))
    assert [(c.collective, c.beside, c.workers) for c in network.costs] == [
        (collective, beside, world)
        for collective in ("native", "ring")
        for beside in ("nothing", "compute")
    ]
    for entry in network.costs:
        assert isinstance(entry, CollectiveCost)
        assert isinstance(entry.cost, Curve)
        assert entry.cost.nbytes[0] == 1024
        assert entry.cost.nbytes[-1] == 16 * 1024
        assert entry.latency_s >= 0
    # Idle, sizes between the coarse ones are measured too.
    idle, loaded = network.costs[:2]
    assert set(loaded.cost.nbytes) < set(idle.cost.nbytes)
    assert isinstance(network.links, Links)
    (level,) = network.links.levels
    assert level.members is None
    assert level.link.latency_s > 0
    assert make_plan(small_trace, network, workers=world).buckets[0].collective == "native"


def test_other_operations_and_what_only_some_of_them_have():
    network = on_ranks(2, ways=ways(["all-reduce", "broadcast"], ["ring", "mst"]), **SHORTEST)
    assert {(c.operation, c.collective) for c in network.costs} == {
        ("all-reduce", "ring"),
        ("all-reduce", "mst"),
        ("broadcast", "mst"),
    }


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_halves_of_an_all_reduce(small_trace, lanes):
    """What plans for both passes are made from."""
    halves = ("reduce-scatter", "all-gather")
    network = on_ranks(2, lanes=lanes, ways=ways(["all-reduce", *halves], ["ring"]), **SHORTEST)
    assert {(c.operation, c.beside) for c in network.costs} == {
        (operation, beside)
        for operation in ("all-reduce", *halves)
        for beside in ("nothing", "compute")
    }
    plan = make_plan(small_trace, network, workers=2, passes="both")
    assert {bucket.collective for bucket in plan.buckets} == {"ring"}


def asked_for(group, operations, collectives):
    network = calibrate(
        group,
        name="here",
        operations=operations,
        collectives=collectives,
        largest_bytes=8 * 1024,
        repeats=1,
    )
    return [(c.operation, c.collective) for c in network.costs if c.beside == "nothing"]


def test_as_users_call_it():
    assert (
        on_threads(2, asked_for, ["all-reduce", "broadcast"], ["native", "ring"])
        == [[("all-reduce", "native"), ("all-reduce", "ring"), ("broadcast", "native")]] * 2
    )


def misunderstood(group, operations, collectives):
    with pytest.raises(RequestError) as caught:
        asked_for(group, operations, collectives)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operations", "collectives", "complaint"),
    [
        (["all-redce"], ["ring"], "no operation 'all-redce', did you mean all-reduce? There are"),
        (["all-reduce"], ["rign"], "no all-reduce by 'rign', did you mean ring? There are native"),
        (["broadcast"], ["native", "ring"], "no broadcast by 'ring'"),
    ],
)
def test_what_cannot_be_asked_for(operations, collectives, complaint):
    for said in on_threads(2, misunderstood, operations, collectives):
        assert said.startswith(complaint)


def refused(group, options):
    with pytest.raises(RequestError) as caught:
        measure_network(group, name="here", **options)
    return str(caught.value)


def test_rounded_messages_are_timed_by_themselves():
    rounded = [Way("all-reduce", name) for name in ("native", "native+fp16", "native+bf16")]
    network = on_ranks(2, ways=rounded, beside={"nothing": nullcontext})
    assert [c.collective for c in network.costs] == ["native", "native+fp16", "native+bf16"]
    assert network.collectives == ("native",)
    cost = network.cost("all-reduce", "native", workers=2, compression=Compression(method="fp16"))
    assert cost == network.costs[1].cost


def averaged(group, way):
    message = torch.full((5,), 2.0 * group.rank())
    send_in_turn(Communicator(group), Lanes(()), way, [message])
    return message.tolist()


@pytest.mark.parametrize("rounding", ["fp16", "bf16"])
def test_rounded_messages_are_means_as_torchs_hooks_make_them(rounding):
    assert (
        on_threads(3, averaged, Way("all-reduce", f"native+{rounding}"))
        == [pytest.approx([2.0] * 5, rel=0.01)] * 3
    )


def test_what_cannot_be_calibrated():
    assert on_threads(1, refused, {}) == [
        "one worker sends no messages; calibrate a group of at least two"
    ]
    complaint = "calibrate up to at least 8192 bytes, got 4096"
    assert on_threads(2, refused, {"largest_bytes": 4096}) == [complaint] * 2


def test_load_runs_only_inside_its_block():
    for _ in range(3):
        with computing(torch.device("cpu")) as thread:
            assert thread.is_alive()
        assert not thread.is_alive()


@pytest.mark.parametrize("messages", [2, 3, 16])
@pytest.mark.parametrize("latency_s", [0.0, 0.25, 1.0])
def test_what_only_the_first_message_of_a_stream_takes_is_counted_once(messages, latency_s):
    """Whatever a further one takes, what comes out is what went in."""
    gaps_s = [1.0, 2.0, 10.0]
    samples = [
        sample_of([latency_s + gap_s] * 3, [latency_s + messages * gap_s] * 3, messages)
        for gap_s in gaps_s
    ]
    assert all(sample.noise == 0 for sample in samples)
    found_s, found_latency_s = gaps_of(samples)
    assert found_latency_s == pytest.approx(latency_s)
    assert found_s == pytest.approx(gaps_s)


def test_one_message_that_was_slow_by_chance_changes_nothing():
    slow = sample_of([30.0, 30.0, 30.0], [20.0] * 3, 2)
    others = [sample_of([gap_s + 0.1], [2 * gap_s + 0.1], 2) for gap_s in (1.0, 2.0, 3.0)]
    gaps_s, latency_s = gaps_of([*others, slow])
    assert latency_s == pytest.approx(0.1)
    assert gaps_s == pytest.approx([1.0, 2.0, 3.0, 9.95])


def test_a_gap_is_at_least_half_of_a_share_and_no_longer_than_a_message_alone():
    assert sample_of([9.0], [8.0], 4).gap_s(100.0) == 1.0
    assert sample_of([1.0], [10.0], 2).gap_s(0.0) == 1.0


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_no_larger_message_is_cheaper_and_the_nearest_such_times_are_taken(seconds):
    """Beside the closed form of that regression: the largest of the smallest means."""
    found, count = never_cheaper(seconds), len(seconds)
    closed = [
        max(min(mean(seconds[a : b + 1]) for b in range(at, count)) for a in range(at + 1))
        for at in range(count)
    ]
    assert found == pytest.approx(closed)
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(found))
    assert never_cheaper(sorted(seconds)) == sorted(seconds)

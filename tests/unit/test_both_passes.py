"""Plans for both passes: exactness against brute force, and how they compare with all-reduces."""

from itertools import accumulate
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    all_mergings,
    costs,
    end_of_communication_s,
    examples,
    iteration_of_both_s,
    lines,
    traces,
    traces_of_two_passes,
)

from gradweave import (
    CollectiveCost,
    Compression,
    Network,
    RequestError,
    Tensor,
    Trace,
    UnknownCost,
    load_network,
    load_trace,
    make_plan,
)
from gradweave._src.costs import Line, Total
from gradweave._src.plan import Plan
from gradweave._src.planning import PLANNERS, both_passes
from gradweave._src.planning.both_passes import optimal_for_both
from gradweave._src.planning.optimal import optimal
from gradweave._src.simulation import compare_passes

NAMES = ["fixed:100B" if name == "fixed" else name for name in PLANNERS]


def halves_of(reduce_scatter, all_gather, workers=2):
    entries = {"reduce-scatter": reduce_scatter, "all-gather": all_gather}
    return Network(
        name="drawn",
        source="drawn",
        costs=tuple(
            CollectiveCost(operation=operation, collective="native", workers=workers, cost=cost)
            for operation, cost in entries.items()
        ),
    )


def all_iterations_s(trace, *halves):
    return {
        tuple(lengths): iteration_of_both_s(trace, lengths, *halves)
        for lengths in all_mergings(len(trace.tensors))
    }


@pytest.mark.parametrize("at_once", [both_passes.AT_ONCE, 1, 7])
@given(trace=traces_of_two_passes(), scatter=costs, gather=costs)
@examples(100)
def test_tolerance_zero_equals_brute_force(at_once, trace, scatter, gather):
    """Also of models with so many tensors that not all buckets are looked at in one go."""
    with mock.patch.object(both_passes, "AT_ONCE", at_once):
        check_against_brute_force(trace, scatter, gather)


def check_against_brute_force(trace, scatter, gather):
    planned = optimal_for_both(trace, scatter, gather, tolerance=0)
    every_s = all_iterations_s(trace, scatter, gather)
    shortest_s = min(every_s.values())
    assert every_s[tuple(planned)] == pytest.approx(shortest_s, rel=1e-9, abs=1e-12)
    fewest = min(len(p) for p, taken_s in every_s.items() if taken_s <= shortest_s)
    assert len(planned) <= fewest


@given(
    trace=traces_of_two_passes(most=8),
    scatter=costs,
    gather=costs,
    tolerance=st.sampled_from([0.01, 0.1, 1.0]),
)
@examples(100)
def test_within_a_tolerance_there_are_few_messages(trace, scatter, gather, tolerance):
    planned = optimal_for_both(trace, scatter, gather, tolerance=tolerance)
    every_s = all_iterations_s(trace, scatter, gather)
    shortest_s = min(every_s.values())
    assert every_s[tuple(planned)] <= shortest_s * (1 + tolerance) * (1 + 1e-9)
    near_s = shortest_s * (1 + tolerance / 4)
    assert len(planned) <= min(len(p) for p, taken_s in every_s.items() if taken_s <= near_s)


@given(trace=traces_of_two_passes(most=30), scatter=costs, gather=costs)
@examples(60)
def test_the_optimum_never_loses_to_another_planner(trace, scatter, gather):
    halves = halves_of(scatter, gather)
    ours, *others = (
        make_plan(trace, halves, workers=2, planner=planner, passes="both")
        for planner in ("optimal:0", *NAMES)
    )
    ours_s = iteration_of_both_s(trace, list(ours.lengths), scatter, gather)
    for plan in others:
        theirs_s = iteration_of_both_s(trace, list(plan.lengths), scatter, gather)
        assert ours_s <= theirs_s * (1 + 1e-9), plan.planner
    assert {plan.passes for plan in (ours, *others)} == {"both"}


def backward_only_s(trace, lengths, all_reduce):
    return trace.forward_s + end_of_communication_s(trace, lengths, all_reduce)


def hidden_by_forward(trace, lengths, all_gather):
    """Whether, behind the first all-gather, forward waits for none: the law's condition."""
    ends = list(accumulate(lengths))
    first, *others = reversed(list(zip(ends, lengths, strict=True)))
    gathered_s = 0.0
    before_s = sum(tensor.forward_s for tensor in trace.tensors[first[0] - first[1] :])
    for end, length in others:
        members = trace.tensors[end - length : end]
        gathered_s += all_gather.startup_s
        gathered_s += all_gather.s_per_byte * sum(tensor.nbytes for tensor in members)
        if gathered_s > before_s:
            return False
        before_s += sum(tensor.forward_s for tensor in members)
    return True


@given(trace=traces_of_two_passes(most=7), scatter=lines, gather=lines)
@examples(100)
def test_where_forward_hides_all_but_the_first_gather_both_passes_never_lose(
    trace, scatter, gather
):
    """The same buckets, where an all-reduce costs what its halves do."""
    whole = Total((scatter, gather))
    for lengths in all_mergings(len(trace.tensors)):
        both_s = iteration_of_both_s(trace, lengths, scatter, gather)
        alone_s = backward_only_s(trace, lengths, whole)
        if hidden_by_forward(trace, lengths, gather):
            assert both_s <= alone_s * (1 + 1e-9)


@given(trace=traces_of_two_passes(), scatter=lines, gather=lines)
@examples(100)
def test_where_the_network_is_never_idle_both_passes_never_lose(trace, scatter, gather):
    """All gradients ready at once: backward hides nothing."""
    whole = Total((scatter, gather))
    at_once = trace.rescaled(backward_s=1e-12) if trace.backward_s > 1e-12 else trace
    best = optimal(at_once, whole, tolerance=0)
    alone_s = backward_only_s(at_once, best, whole)
    planned = optimal_for_both(at_once, scatter, gather, tolerance=0)
    assert iteration_of_both_s(at_once, planned, scatter, gather) <= alone_s + 1e-9 * (1 + alone_s)


def test_a_long_backward_hides_what_a_short_forward_cannot():
    """So both passes can lose, although the halves cost together what the whole does.

    The large tensor is ready long before backward ends, which hides all of its all-reduce. Its
    all-gather is needed after 0.1 s of the next forward.
    """
    large, small = (
        Tensor(name=name, elements=size, bytes_per_element=1, ready_s=ready_s, forward_s=0.1)
        for name, size, ready_s in (("large", 300, 1.0), ("small", 1, 10.0))
    )
    trace = Trace(
        name="two", origin="estimated", source="made up", batch_size=1, tensors=(large, small)
    )
    half = Line(startup_s=0.0, s_per_byte=0.01)
    planned = optimal_for_both(trace, half, half, tolerance=0)
    both_s = iteration_of_both_s(trace, planned, half, half)
    whole = Line(startup_s=0.0, s_per_byte=0.02)
    best = optimal(trace, whole, tolerance=0)
    assert both_s == pytest.approx(0.2 + 10 + 0.01 + (3.01 - 0.1))
    assert backward_only_s(trace, best, whole) == pytest.approx(0.2 + 10 + 0.02)


seconds = st.floats(0.0, 10.0)
updated_buckets = st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6)


def forward_with_updates_s(buckets, updated_s):
    """From the last reduce-scatter to the end of forward, which begins when all are updated.

    ``buckets``, in the order in which forward needs them, have what updating one takes, what its
    all-gather takes, and what forward computes with it; ``updated_s``: when each has been updated.
    """
    network_s, now_s = 0.0, updated_s[-1]
    for (_, gather_s, computed_s), ready_s in zip(buckets, updated_s, strict=True):
        network_s = max(network_s, ready_s) + gather_s
        now_s = max(now_s, network_s) + computed_s
    return now_s


@given(buckets=updated_buckets)
def test_updating_bucket_by_bucket_leaves_the_first_update_in_sight(buckets):
    """Where an all-gather takes as long as the next update; elsewhere it loses nothing, either."""
    updates_s = [update_s for update_s, _, _ in buckets]
    forward_s = sum(computed_s for _, _, computed_s in buckets)
    without_s = forward_with_updates_s(buckets, [0.0] * len(buckets))
    whole_s = forward_with_updates_s(buckets, [sum(updates_s)] * len(buckets))
    parts_s = forward_with_updates_s(buckets, list(accumulate(updates_s)))
    assert whole_s == pytest.approx(without_s + sum(updates_s))
    assert parts_s <= whole_s + 1e-9
    gathers_s = [gather_s for _, gather_s, _ in buckets]
    if all(after >= update for after, update in zip(gathers_s, updates_s[1:], strict=False)):
        stall_s = without_s - forward_s
        expected_s = forward_s + max(sum(updates_s), updates_s[0] + stall_s)
        assert parts_s == pytest.approx(expected_s)


@pytest.mark.parametrize("name", ["resnet50", "vgg16"])
@pytest.mark.parametrize("workers", [4, 64, 512])
def test_shipped_jobs_gain_or_keep(name, workers):
    """Where communication outweighs backward, on 1 GbE."""
    trace, network = load_trace(name), load_network("gtopk-1gbe")
    planned = make_plan(trace, network, workers=workers, planner="optimal:0", passes="both")
    alone = make_plan(trace, network, workers=workers, planner="optimal:0")
    scatter, gather, whole = (
        network.cost(op, "ring", workers=workers)
        for op in ("reduce-scatter", "all-gather", "all-reduce")
    )
    both_s = iteration_of_both_s(trace, list(planned.lengths), scatter, gather)
    assert both_s <= backward_only_s(trace, list(alone.lengths), whole) * (1 + 1e-9)


def test_halves_that_were_measured_are_the_default():
    half = Line(startup_s=0.001, s_per_byte=1e-9)
    trace = load_trace("alexnet")
    plan = make_plan(trace, halves_of(half, half), workers=2, passes="both")
    assert {bucket.collective for bucket in plan.buckets} == {"native"}
    on_links = make_plan(trace, load_network("k80-10gbe"), workers=8, passes="both")
    assert {bucket.collective for bucket in on_links.buckets} == {"ring"}


def test_a_network_that_does_not_know_the_halves():
    network = load_network("cluster1-16xk80-10gbe")
    with pytest.raises(UnknownCost, match=r"calibrate with --op all-reduce,reduce-scatter,all-gat"):
        make_plan(load_trace("alexnet"), network, workers=16, passes="both")
    linked = load_network("k80-10gbe")
    with pytest.raises(UnknownCost, match=r"no formula for reduce-scatter by 'double-tree'.*ring"):
        make_plan(
            load_trace("alexnet"), linked, workers=16, collective="double-tree", passes="both"
        )


def test_what_both_passes_cannot_do(small_trace, linked_network):
    thinned = Compression(method="gtopk", density=0.01)
    with pytest.raises(UnknownCost, match=r"thins out an all-reduce, not a reduce-scatter$"):
        make_plan(small_trace, linked_network, workers=2, compression=thinned, passes="both")
    with pytest.raises(RequestError, match="no passes 'forward'; there are backward, both"):
        make_plan(small_trace, linked_network, workers=2, passes="forward")
    plan = make_plan(small_trace, linked_network, workers=2, compression=thinned)
    with pytest.raises(ValueError, match="both passes have none"):
        Plan(planner=plan.planner, buckets=plan.buckets, passes="both")


@given(trace=traces(most=5))
def test_one_worker_sends_one_message(trace):
    plan = make_plan(trace, load_network("k80-10gbe"), workers=1, passes="both")
    assert plan.lengths == (len(trace.tensors),)


@given(trace=traces_of_two_passes(), scatter=lines, gather=lines, whole=lines)
@examples(50)
def test_the_chosen_passes_are_never_slower_than_the_best_plan_for_backward(
    trace, scatter, gather, whole
):
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=2, cost=whole)
    halves = halves_of(scatter, gather)
    network = Network(name="drawn", source="drawn", costs=(entry, *halves.costs))
    compared = compare_passes(trace, network, workers=2, planner="optimal:0")
    alone_s = backward_only_s(trace, optimal(trace, whole, tolerance=0), whole)
    both = optimal_for_both(trace, scatter, gather, tolerance=0)
    both_s = iteration_of_both_s(trace, both, scatter, gather)
    assert compared.faster.outcome.iteration_s == pytest.approx(min(alone_s, both_s))
    assert compared.both.plan.passes == "both"

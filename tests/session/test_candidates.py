"""Which ways plans may take, before and after they were tried."""

import pytest
from msgspec.structs import replace
from on_paper import equal_tensors

from gradweave import CollectiveCost, Compression, Network
from gradweave._src.costs import Line
from gradweave._src.session.candidates import shortlist, travels_for
from gradweave._src.session.learning import MessageTimes, samples_of
from gradweave._src.session.task import PlanningTask
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import MIB

INT8 = Travel("ring", Compression(method="int8"))
SPARSE = Compression(method="gtopk", density=0.1)


def network(**s_per_byte):
    return Network(
        name="learnt",
        source="made up",
        costs=tuple(
            CollectiveCost(
                operation="all-reduce",
                collective=name.replace("_", "+"),
                workers=4,
                cost=Line(startup_s=1.0, s_per_byte=cost),
            )
            for name, cost in s_per_byte.items()
        ),
    )


def task(**options):
    return PlanningTask(workers=4, **options)


def test_a_rounding_may_be_tried_before_it_is_known():
    may_round = task(roundings=("ring+int8",))
    assert travels_for(may_round, network(native=1.0), None) == (Travel("native"), INT8)
    known = network(native=1.0, ring_int8=2.0)
    assert travels_for(may_round, known, None) == (Travel("native"), INT8)


def test_where_nothing_is_tried_nothing_unknown_is_chosen():
    trusting = task(roundings=("ring+int8",), trial_steps=0)
    assert travels_for(trusting, network(native=1.0), None) == (Travel("native"),)


def test_until_it_was_tried_fewer_bytes_are_all_the_difference():
    guessed = network(native=1.0).cost(
        "all-reduce", "ring", workers=4, compression=INT8.compression
    )
    assert guessed == Line(startup_s=1.0, s_per_byte=INT8.compression.wire_share)
    known = network(native=1.0, ring_int8=2.0).cost(
        "all-reduce", "ring", workers=4, compression=INT8.compression
    )
    assert known == Line(startup_s=1.0, s_per_byte=2.0)


def test_dense_buckets_are_mixed_with_sparse_ones_where_that_is_allowed():
    known, thinned_out = network(native=1.0), Travel("native", SPARSE)
    assert travels_for(task(), known, SPARSE) == (thinned_out,)
    mixing = task(mixes_dense=True)
    assert travels_for(mixing, known, SPARSE) == (thinned_out, Travel("native"))


def listed(known, *travels, tensors=10, nbytes=MIB // 2, apart_s=0.2):
    return shortlist(
        equal_tensors(tensors, nbytes, apart_s=apart_s),
        known,
        workers=4,
        planner="optimal",
        travels=travels,
        baseline_lengths=[1] * tensors,
    )


def priced(**lines):
    known = network(**dict.fromkeys(lines, 1.0))
    costs = zip(known.costs, lines.values(), strict=True)
    return replace(known, costs=tuple(replace(entry, cost=cost) for entry, cost in costs))


NATIVE = Line(startup_s=0.2, s_per_byte=1e-7)


def test_fewer_messages_and_the_best_uniform_size_are_worth_trying():
    found = listed(priced(native=NATIVE), Travel("native"))
    assert [(one.plan.planner, one.plan.lengths) for one in found] == [
        ("optimal", (5, 3, 2)),
        ("optimal:0.05", (7, 3)),
        ("optimal:0.25", (10,)),
        ("fixed:1MiB", (2, 2, 2, 2, 2)),
        ("ddp", (1,) * 10),
    ]
    assert [one.is_baseline for one in found] == [False] * 4 + [True]


def test_the_planners_plan_is_first_though_a_uniform_one_is_the_same():
    known = priced(native=Line(startup_s=0.1, s_per_byte=1e-7))
    found = listed(known, Travel("native"), tensors=12, nbytes=MIB, apart_s=0.15)
    assert [one.plan.planner for one in found] == ["optimal", "optimal:0.05", "optimal:0.25", "ddp"]


@pytest.mark.parametrize(("share", "by"), [(0.95, "native"), (0.85, "ring")])
def test_another_way_must_be_better_by_what_a_thread_of_ours_is_worth(share, by):
    ring = Line(startup_s=share * NATIVE.startup_s, s_per_byte=share * NATIVE.s_per_byte)
    *found, baseline = listed(priced(native=NATIVE, ring=ring), Travel("native"), Travel("ring"))
    assert {bucket.collective for one in found for bucket in one.plan.buckets} == {by}
    assert {bucket.collective for bucket in baseline.plan.buckets} == {"native"}


def times(collective, ready_s, done_s):
    return MessageTimes(
        operation="all-reduce", collective=collective, nbytes=8, ready_s=ready_s, done_s=done_s
    )


def test_messages_that_waited_for_others_of_another_kind_tell_nothing():
    """Those of ours wait for each other, whatever they are rounded to; the backend's do not."""
    one_rank = [
        times("ring+bf16", 0.0, 2.0),
        times("ring+int8", 1.0, 3.0),
        times("native", 1.5, 2.5),
        times("ring+int8", 4.0, 4.5),
    ]
    found = [(one.collective, one.taken_s) for one in samples_of([one_rank])]
    assert sorted(found) == [("native", 1.0), ("ring+int8", 0.5)]

"""Which ways plans may take, before and after they were tried."""

from gradweave import CollectiveCost, Compression, Network
from gradweave._src.costs import Line
from gradweave._src.session.candidates import travels_for
from gradweave._src.session.learning import MessageTimes, samples_of
from gradweave._src.session.task import PlanningTask
from gradweave._src.travel import Travel

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

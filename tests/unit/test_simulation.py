"""The simulator against numbers worked out by hand, and what must hold for any job."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from strategies import (
    end_of_communication_s,
    examples,
    iteration_of_both_s,
    lines,
    traces,
    traces_of_two_passes,
)

from gradweave import (
    CollectiveCost,
    Line,
    Network,
    RequestError,
    load_network,
    load_trace,
    simulate,
)
from gradweave._src.compression import Compression, compression_of
from gradweave._src.plan import merge
from gradweave._src.planning import PLANNERS, make_plan
from gradweave._src.simulation import Case, Jitter, cases, run
from gradweave._src.simulation.jitter import slowest

NAMES = ["fixed:100B" if name == "fixed" else name for name in PLANNERS]


def network_of(cost, workers=2, latency_s=0.0):
    entry = CollectiveCost(
        operation="all-reduce",
        collective="native",
        workers=workers,
        cost=cost,
        latency_s=latency_s,
    )
    return Network(name="drawn", source="drawn", costs=(entry,))


def spans_of(timeline, lane):
    return [(s.label, s.start_s, s.end_s) for s in timeline.spans if s.lane == lane]


@given(trace=traces(), line=lines, latency_s=st.floats(0, 5), planner=st.sampled_from(NAMES))
def test_latency_delays_arrivals_and_nothing_else(trace, line, latency_s, planner):
    plan = make_plan(trace, network_of(line), workers=2, planner=planner)
    without = simulate(trace, plan, network_of(line), workers=2)
    late = simulate(trace, plan, network_of(line, latency_s=latency_s), workers=2)
    for (_, start, end), (_, late_start, late_end) in zip(
        spans_of(without, "communication"), spans_of(late, "communication"), strict=True
    ):
        assert late_start == start
        assert late_end == pytest.approx(end + latency_s)


def test_an_iteration_by_hand(small_trace, linked_network):
    """Three workers, ring: a = 4 * 0.25 = 1, b = 2/3 * (0.002 + 0.0005)."""
    b = 2 / 3 * 0.0025
    plan = make_plan(small_trace, linked_network, workers=3, planner="wfbp")
    timeline = simulate(small_trace, plan, linked_network, workers=3)
    assert spans_of(timeline, "forward") == [("a", 0.0, 1.5), ("c", 1.5, 2.0)]
    assert spans_of(timeline, "backward") == [("c", 2.0, 3.0), ("a", 3.0, 5.0)]
    first_s, second_s = 3.0 + 1 + 400 * b, 3.0 + 2 + 404 * b
    assert spans_of(timeline, "communication") == [
        ("all-reduce 1", 3.0, pytest.approx(first_s)),
        ("all-reduce 2", pytest.approx(first_s), pytest.approx(second_s)),
        ("all-reduce 3", pytest.approx(second_s), pytest.approx(second_s + 1 + 1000 * b)),
    ]


def beside_both(busy, idle):
    """A network that was measured beside compute and beside nothing."""
    (entry,) = network_of(busy).costs
    known = (replace(entry, beside="compute"), replace(entry, cost=idle))
    return Network(name="drawn", source="drawn", costs=known)


def test_a_message_goes_on_as_on_idle_workers_when_backward_is_over(small_trace):
    """1,404 bytes: 1.404 s on idle workers, twice that beside compute. Backward ends at 5 s."""
    network = beside_both(Line(startup_s=0, s_per_byte=0.002), Line(startup_s=0, s_per_byte=0.001))
    late, early = (
        simulate(
            small_trace,
            merge(small_trace, lengths, planner="by hand", collective="native"),
            network,
            workers=2,
            idle_after_backward=True,
        )
        for lengths in ([3], [2, 1])
    )
    assert spans_of(late, "communication") == [("all-reduce 1", 5.0, pytest.approx(6.404))]
    assert spans_of(early, "communication") == [
        ("all-reduce 1", 3.0, pytest.approx(3.808)),
        ("all-reduce 2", 5.0, pytest.approx(6.0)),
    ]


@given(trace=traces(), busy=lines, idle=lines, planner=st.sampled_from(NAMES))
def test_idle_workers_after_backward_lie_between_always_and_never(trace, busy, idle, planner):
    network = beside_both(busy, idle)
    plan = make_plan(trace, network, workers=2, planner=planner)
    always_s, never_s = (
        simulate(trace, plan, known, workers=2).iteration_s
        for known in (network.while_idle(), network)
    )
    between_s = simulate(trace, plan, network, workers=2, idle_after_backward=True).iteration_s
    cheapest, dearest = (
        Line(
            startup_s=extreme(busy.startup_s, idle.startup_s),
            s_per_byte=extreme(busy.s_per_byte, idle.s_per_byte),
        )
        for extreme in (min, max)
    )
    least_s, most_s = (
        simulate(trace, plan, network_of(line), workers=2).iteration_s
        for line in (cheapest, dearest)
    )
    assert least_s * (1 - 1e-12) <= between_s <= most_s * (1 + 1e-12)
    if cheapest == idle:
        assert always_s * (1 - 1e-12) <= between_s <= never_s * (1 + 1e-12)


def test_a_parameter_server_pushes_then_pulls(small_trace, linked_network):
    plan = make_plan(
        small_trace, linked_network, workers=3, planner="single", collective="parameter-server"
    )
    timeline = simulate(small_trace, plan, linked_network, workers=3)
    push_s, pull_s = 2 * (0.25 + 1404 * 0.0015), 2 * (0.25 + 1404 * 0.001)
    assert spans_of(timeline, "communication") == [
        ("push 1", 5.0, pytest.approx(5.0 + push_s)),
        ("pull 1", pytest.approx(5.0 + push_s), pytest.approx(5.0 + push_s + pull_s)),
    ]


def test_a_message_of_two_phases_is_late_once(small_trace):
    """Selecting ends when it ends; the exchange after it arrives a latency later."""
    sparse = Compression(method="gtopk", density=0.1)
    exchange = CollectiveCost(
        operation="all-reduce",
        collective=str(sparse),
        workers=3,
        cost=Line(startup_s=2.0, s_per_byte=0.0),
        latency_s=0.5,
    )
    dense = replace(exchange, collective="native")
    network = Network(name="n", source="n", costs=(dense, exchange), selection_s_per_element=0.01)
    plan = merge(small_trace, [2, 1], planner="p", collective="native", compression=sparse)
    timeline = simulate(small_trace, plan, network, workers=3)
    # Forward takes 2 s; 101 elements are ready 1 s later and 250 elements 3 s later.
    assert spans_of(timeline, "communication") == [
        ("select 1", 3.0, pytest.approx(4.01)),
        ("gtopk:0.1 1", pytest.approx(4.01), pytest.approx(6.01 + 0.5)),
        ("select 2", pytest.approx(6.01), pytest.approx(8.51)),
        ("gtopk:0.1 2", pytest.approx(8.51), pytest.approx(10.51 + 0.5)),
    ]


def test_backward_waits_for_parameters_that_forward_takes_no_time_for(small_trace):
    """Those of c come last, and nothing is computed with them."""
    c, *others = small_trace.tensors
    trace = replace(small_trace, tensors=(replace(c, forward_s=0.0), *others))
    each = Line(startup_s=4.0, s_per_byte=0.0)
    plan = merge(trace, [1, 2], planner="p", collective="native", passes="both")
    timeline = simulate(trace, plan, halves_of(each, each), workers=2)
    assert spans_of(timeline, "forward") == [("a", 4.0, 5.5)]
    assert min(start_s for _, start_s, _ in spans_of(timeline, "backward")) == 8.0


def test_naive_sends_nothing_before_backward_has_ended(small_trace, linked_network):
    plan = make_plan(small_trace, linked_network, workers=3, planner="naive")
    timeline = simulate(small_trace, plan, linked_network, workers=3)
    assert min(start_s for _, start_s, _ in spans_of(timeline, "communication")) == 5.0
    assert timeline.overlap == 0


@given(trace=traces(), line=lines)
@examples(60)
def test_every_job_keeps_these_laws(trace, line):
    for name in NAMES:
        check_laws(name, trace, line)


def check_laws(name, trace, line):
    network = network_of(line)
    plan = make_plan(trace, network, workers=2, planner=name)
    timeline = simulate(trace, plan, network, workers=2)
    assert timeline.compute_s == pytest.approx(trace.compute_s)
    assert timeline.iteration_s >= trace.compute_s * (1 - 1e-12)
    assert timeline.iteration_s == pytest.approx(timeline.compute_s + timeline.exposed_s)
    sent_bytes = sum(span.nbytes for span in timeline.spans)
    assert sent_bytes == trace.nbytes.sum()
    messages = [span for span in timeline.spans if span.lane == "communication"]
    total_s = line.startup_s * len(messages) + line.s_per_byte * sent_bytes
    assert timeline.communication_s == pytest.approx(total_s)
    if plan.overlap:
        end_s = trace.forward_s + end_of_communication_s(trace, list(plan.lengths), line)
        assert timeline.iteration_s == pytest.approx(end_s)


def halves_of(scatter, gather, latency_s=0.0):
    return Network(
        name="drawn",
        source="drawn",
        costs=tuple(
            CollectiveCost(
                operation=operation,
                collective="native",
                workers=2,
                cost=cost,
                latency_s=latency_s,
            )
            for operation, cost in (("reduce-scatter", scatter), ("all-gather", gather))
        ),
    )


@given(
    trace=traces_of_two_passes(), scatter=lines, gather=lines, latency_s=st.sampled_from([0.0, 0.3])
)
@examples(60)
def test_both_passes_keep_these_laws(trace, scatter, gather, latency_s):
    for name in NAMES:
        check_laws_of_both(name, trace, scatter, gather, latency_s)


def check_laws_of_both(name, trace, scatter, gather, latency_s):
    network = halves_of(scatter, gather, latency_s)
    plan = make_plan(trace, network, workers=2, planner=name, passes="both")
    timeline = simulate(trace, plan, network, workers=2)
    assert timeline.compute_s == pytest.approx(trace.compute_s)
    assert timeline.iteration_s == pytest.approx(timeline.compute_s + timeline.exposed_s)
    if plan.overlap:
        whole_s = iteration_of_both_s(trace, list(plan.lengths), scatter, gather)
        assert timeline.iteration_s == pytest.approx(whole_s + 2 * latency_s)
    else:
        assert timeline.exposed_s == pytest.approx(timeline.communication_s)
    messages = {
        operation: [s for s in timeline.spans if s.label.startswith(operation)]
        for operation in ("reduce-scatter", "all-gather")
    }
    for sent in messages.values():
        assert sum(span.nbytes for span in sent) == trace.nbytes.sum()
        assert len(sent) == len(plan.buckets)
    arrived_s = {name: s.end_s for s in messages["all-gather"] for name in s.tensors}
    for span in timeline.spans:
        if span.lane == "forward":
            assert span.start_s >= arrived_s[span.label]
    last_gather_s = max(span.end_s for span in messages["all-gather"])
    assert min(span.start_s for span in messages["reduce-scatter"]) >= last_gather_s


def test_both_passes_by_hand(small_trace, linked_network):
    """Three workers, ring: each half starts up for 2 * 0.25 s; c travels alone, b and a together.

    Forward needs a (and b) at once and c after 1.5 s; c arrives after both all-gathers.
    """
    plan = merge(small_trace, [1, 2], planner="by hand", collective="ring", passes="both")
    timeline = simulate(small_trace, plan, linked_network, workers=3)
    gather_b, scatter_b = 2 / 3 * 0.001, 2 / 3 * 0.0015
    first_s = 0.5 + 1004 * gather_b
    second_s = first_s + 0.5 + 400 * gather_b
    assert second_s < first_s + 1.5
    forward_s = first_s + 2.0
    assert spans_of(timeline, "forward") == [
        ("a", pytest.approx(first_s), pytest.approx(first_s + 1.5)),
        ("c", pytest.approx(first_s + 1.5), pytest.approx(forward_s)),
    ]
    c_s = forward_s + 1.0 + 0.5 + 400 * scatter_b
    end_s = forward_s + 3.0 + 0.5 + 1004 * scatter_b
    assert spans_of(timeline, "communication") == [
        ("all-gather 2", 0.0, pytest.approx(first_s)),
        ("all-gather 1", pytest.approx(first_s), pytest.approx(second_s)),
        ("reduce-scatter 1", pytest.approx(forward_s + 1.0), pytest.approx(c_s)),
        ("reduce-scatter 2", pytest.approx(forward_s + 3.0), pytest.approx(end_s)),
    ]
    assert timeline.exposed_s == pytest.approx(first_s + end_s - forward_s - 3.0)


def test_one_worker_only_computes(small_trace, linked_network):
    for passes in ("backward", "both"):
        plan = make_plan(small_trace, linked_network, workers=1, passes=passes)
        timeline = simulate(small_trace, plan, linked_network, workers=1)
        assert timeline.iteration_s == small_trace.compute_s
        assert timeline.efficiency == 1


def test_a_plan_for_another_trace_is_refused(small_trace, linked_network):
    plan = make_plan(load_trace("alexnet"), linked_network, workers=2)
    with pytest.raises(ValueError, match="are in no bucket"):
        simulate(small_trace, plan, linked_network, workers=2)


def test_cases_are_all_combinations(small_trace, linked_network):
    made = cases(
        [small_trace],
        [linked_network, load_network("k80-10gbe")],
        workers=[2, 4],
        planners=["wfbp", "single"],
        collectives=[None, "double-tree"],
        passes=["backward", "both"],
    )
    assert len(made) == 32
    assert {case.collective for case in made} == {"ring", "double-tree"}


def outcome(trace, network, workers, planner, **options):
    case = Case(trace=trace, network=network, workers=workers, planner=planner, collective="ring")
    return run(case, **options).outcome


def test_the_papers_64_workers():
    """MG-WFBP over WFBP and over a single message: 1.78 and 1.35 in the paper."""
    trace, network = load_trace("googlenet-k80"), load_network("k80-10gbe")
    wfbp, single, merged = (
        outcome(trace, network, 64, name).iteration_s for name in ("wfbp", "single", "mgwfbp")
    )
    assert 1.70 <= wfbp / merged <= 1.90
    assert 1.25 <= single / merged <= 1.40


@pytest.mark.parametrize("workers", [256, 512, 1024, 2048])
@pytest.mark.parametrize("name", ["googlenet-k80", "resnet50"])
def test_mgwfbp_sends_a_single_message_from_256_workers_up_and_the_optimum_is_better(name, workers):
    trace, network = load_trace(name), load_network("k80-10gbe")
    assert outcome(trace, network, workers, "mgwfbp").messages == 1
    single_s = outcome(trace, network, workers, "single").iteration_s
    assert outcome(trace, network, workers, "optimal:0").iteration_s < single_s


def test_one_message_per_tensor_is_best_on_few_workers_and_worst_on_many():
    trace, network = load_trace("googlenet-k80"), load_network("k80-10gbe")
    faster = [
        outcome(trace, network, workers, "wfbp").iteration_s
        < outcome(trace, network, workers, "single").iteration_s
        for workers in (4, 8, 16, 64, 128, 2048)
    ]
    assert faster == [True, True, True, False, False, False]


@given(trace=traces(), spread=st.floats(0, 1), workers=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_slowest_worker_is_a_trace_again(trace, spread, workers, seed):
    random = np.random.default_rng(seed)
    slow = slowest(trace, Jitter(spread=spread), workers=workers, random=random)
    assert [t.name for t in slow.tensors] == [t.name for t in trace.tensors]
    assert slow.nbytes.tolist() == trace.nbytes.tolist()
    if spread == 0:
        assert slow.compute_s == pytest.approx(trace.compute_s)


def test_a_straggler_slows_everybody(small_trace, linked_network):
    slow = outcome(
        small_trace,
        linked_network,
        4,
        "single",
        jitter=Jitter(stragglers=1, slowdown=2.0),
        iterations=3,
    )
    alone = outcome(small_trace, linked_network, 4, "single")
    assert slow.iteration_s - alone.iteration_s == pytest.approx(small_trace.compute_s)
    assert slow.compute_s == small_trace.compute_s
    assert slow.efficiency < alone.efficiency


def test_more_workers_wait_longer_for_the_slowest(small_trace, linked_network):
    def mean_compute_s(workers):
        random = np.random.default_rng(1)
        jitter = Jitter(spread=0.2)
        drawn = [slowest(small_trace, jitter, workers=workers, random=random) for _ in range(200)]
        return np.mean([trace.compute_s for trace in drawn])

    assert mean_compute_s(1) == pytest.approx(small_trace.compute_s, rel=0.05)
    assert mean_compute_s(1) < mean_compute_s(4) < mean_compute_s(64)


def test_a_seed_repeats_a_run(small_trace, linked_network):
    def jittered(seed):
        return outcome(
            small_trace,
            linked_network,
            4,
            "wfbp",
            jitter=Jitter(spread=0.3),
            iterations=5,
            seed=seed,
        )

    assert jittered(1) == jittered(1)
    assert jittered(1).iteration_s != jittered(2).iteration_s


def test_jitter_that_cannot_be(small_trace, linked_network):
    for fields in ({"spread": -1.0}, {"slowdown": 0.5}, {"stragglers": -1}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Jitter(**fields)
    with pytest.raises(RequestError, match="5 stragglers among 4 workers"):
        outcome(small_trace, linked_network, 4, "wfbp", jitter=Jitter(stragglers=5))


def test_copies_by_hand(small_trace, linked_network):
    """Each gradient into its bucket as it comes, each bucket out of it after backward, in order."""
    a_byte_s = 0.001
    plan = make_plan(small_trace, linked_network, workers=3, planner="wfbp")
    without = simulate(small_trace, plan, linked_network, workers=3)
    timeline = simulate(small_trace, plan, linked_network, workers=3, copy_s_per_byte=a_byte_s)
    sizes = [tensor.nbytes for tensor in small_trace.tensors]
    ready_s, free_s = [], 0.0
    for tensor in small_trace.tensors:
        free_s = max(free_s, tensor.ready_s) + a_byte_s * tensor.nbytes
        ready_s.append(small_trace.forward_s + free_s)
    sent = [s for s in spans_of(timeline, "communication") if s[0].startswith("all-reduce")]
    assert sent[0][1] == pytest.approx(ready_s[0])
    assert len(sent) == len(sizes)
    now_s = ready_s[-1]
    for number, (_, start_s, end_s) in enumerate(
        s for s in spans_of(timeline, "communication") if s[0].startswith("copy")
    ):
        assert start_s == pytest.approx(max(now_s, sent[number][2]))
        now_s = start_s + a_byte_s * sizes[number]
        assert end_s == pytest.approx(now_s)
    assert timeline.iteration_s == pytest.approx(now_s)
    assert timeline.iteration_s > without.iteration_s


@given(
    trace=traces(),
    line=lines,
    planner=st.sampled_from(NAMES),
    a_byte_s=st.floats(0, 0.01),
    dearer=st.floats(1, 3),
)
def test_dearer_copies_never_make_an_iteration_shorter(trace, line, planner, a_byte_s, dearer):
    network = network_of(line)
    plan = make_plan(trace, network, workers=2, planner=planner)
    times_s = [
        simulate(trace, plan, network, workers=2, copy_s_per_byte=one).iteration_s
        for one in (0.0, a_byte_s, a_byte_s * dearer)
    ]
    assert times_s == sorted(times_s)
    total = float(trace.nbytes.sum())
    assert times_s[1] >= trace.forward_s + 2 * a_byte_s * total - 1e-9


@given(trace=traces(), line=lines, planner=st.sampled_from(NAMES))
def test_copies_that_take_no_time_and_one_worker_change_nothing(trace, line, planner):
    network = network_of(line)
    plan = make_plan(trace, network, workers=2, planner=planner)
    free = simulate(trace, plan, network, workers=2, copy_s_per_byte=0.0)
    assert free == simulate(trace, plan, network, workers=2)
    alone = simulate(trace, plan, network, workers=1)
    assert simulate(trace, plan, network, workers=1, copy_s_per_byte=0.1) == alone


def test_rounded_messages_go_by_a_schedule_of_ours_unless_they_are_told(
    small_trace, linked_network
):
    """gloo's own cannot round, and is what the network was measured with."""
    native = CollectiveCost(
        operation="all-reduce",
        collective="native",
        workers=4,
        cost=Line(startup_s=0.1, s_per_byte=0.001),
    )
    network = replace(linked_network, costs=(native,))
    bf16 = compression_of("bf16")
    for compression, expected in ((None, "native"), (bf16, "ring")):
        (case,) = cases(
            [small_trace],
            [network],
            workers=[4],
            planners=["single"],
            collectives=[None],
            compression=compression,
        )
        planned = make_plan(small_trace, network, workers=4, compression=compression)
        assert {case.collective, planned.buckets[0].collective} == {expected}

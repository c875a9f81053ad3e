"""Laws every planner keeps, the papers' rule as published, and the exactness of the optimum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from strategies import (
    all_mergings,
    costs,
    curves,
    end_of_communication_s,
    examples,
    lines,
    traces,
)

from gradweave import (
    Compression,
    Link,
    Network,
    RequestError,
    Tensor,
    Trace,
    load_network,
    load_trace,
    make_plan,
    simulate,
)
from gradweave._src.compression import EXCHANGE_NAMES, compression_of
from gradweave._src.costs import Curve, Line, flat, least_squares
from gradweave._src.plan import merge
from gradweave._src.planning import PLANNERS, find_planner
from gradweave._src.planning.joint import plan_among
from gradweave._src.planning.mgwfbp import mgwfbp
from gradweave._src.planning.optimal import optimal, optimal_for_any_cost, optimal_for_line
from gradweave._src.travel import Travel

NAMES = ["fixed:100B" if name == "fixed" else name for name in PLANNERS]


class LineAsFormula:
    """A line that hides that it is one, so that the algorithm for any cost is taken."""

    def __init__(self, hidden: Line) -> None:
        self.hidden = hidden
        self.seconds = hidden.seconds
        self.line = hidden.line
        self.known_to_bytes = np.inf


def optimum_by_brute_force_s(trace, cost):
    return min(
        end_of_communication_s(trace, lengths, cost) for lengths in all_mergings(len(trace.tensors))
    )


@given(trace=traces(most=30), cost=costs)
@examples(30)
def test_every_tensor_is_in_exactly_one_message(trace, cost):
    for name in NAMES:
        lengths = find_planner(name)(trace, cost)
        assert sum(lengths) == len(trace.tensors), name
        assert all(length >= 1 for length in lengths), name


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_keeps_backward_order(name, small_trace, linked_network):
    plan = make_plan(small_trace, linked_network, workers=3, planner=name)
    assert [tensor for bucket in plan.buckets for tensor in bucket.tensors] == ["c", "b", "a"]
    assert plan.planner == name


@given(trace=traces(most=9), cost=costs)
@examples(150)
def test_tolerance_zero_equals_brute_force(trace, cost):
    planned_s = end_of_communication_s(trace, optimal(trace, cost, tolerance=0), cost)
    assert planned_s == pytest.approx(optimum_by_brute_force_s(trace, cost), rel=1e-9, abs=1e-12)


@given(trace=traces(most=40), cost=costs)
@examples(100)
def test_the_optimum_never_loses_to_another_planner(trace, cost):
    ours_s = end_of_communication_s(trace, optimal(trace, cost, tolerance=0), cost)
    for name in NAMES:
        theirs_s = end_of_communication_s(trace, find_planner(name)(trace, cost), cost)
        assert ours_s <= theirs_s * (1 + 1e-9), name


@given(trace=traces(most=40), line=lines, tolerance=st.sampled_from([0.0, 0.01, 0.3]))
@examples(150)
def test_the_two_algorithms_agree(trace, line, tolerance):
    by_queue = optimal_for_line(trace, line, tolerance=tolerance)
    by_table = optimal_for_any_cost(trace, LineAsFormula(line), tolerance=tolerance)
    assert len(by_queue) == len(by_table)
    assert end_of_communication_s(trace, by_queue, line) == pytest.approx(
        end_of_communication_s(trace, by_table, line), rel=1e-8, abs=1e-12
    )


@given(trace=traces(most=9), cost=costs, tolerance=st.sampled_from([0.0, 0.01, 0.1, 0.5]))
@examples(150)
def test_within_the_tolerance_no_plan_has_fewer_messages_or_as_few_and_ends_earlier(
    trace, cost, tolerance
):
    lengths = optimal(trace, cost, tolerance=tolerance)
    ours_s = end_of_communication_s(trace, lengths, cost)
    deadline_s = optimum_by_brute_force_s(trace, cost) * (1 + tolerance)
    assert ours_s <= deadline_s * (1 + 1e-9)
    for other in all_mergings(len(trace.tensors)):
        other_s = end_of_communication_s(trace, other, cost)
        if other_s <= deadline_s * (1 - 1e-9):
            assert len(lengths) <= len(other)
            if len(other) == len(lengths):
                assert ours_s <= other_s * (1 + 1e-8)


def test_the_counterexample_to_the_papers_theorem():
    trace = Trace(
        name="counterexample",
        origin="estimated",
        source="docs/merging.md",
        batch_size=1,
        tensors=tuple(
            Tensor(name=name, elements=size, bytes_per_element=1, ready_s=ready_s, forward_s=0)
            for name, size, ready_s in [("a", 10**9, 1.0), ("b", 1, 1.9), ("c", 1, 2.8)]
        ),
    )
    cost = Line(startup_s=1.0, s_per_byte=1e-9)
    theirs, ours = mgwfbp(trace, cost), optimal(trace, cost, tolerance=0)
    assert theirs == [3]
    assert ours == [1, 2]
    assert end_of_communication_s(trace, theirs, cost) == pytest.approx(4.8)
    assert end_of_communication_s(trace, ours, cost) == pytest.approx(4.0)


def algorithm_1_as_printed(ready_s, nbytes, a, b):
    """The journal's pseudo-code line by line, layers counted from L down to 1."""
    layers = len(ready_s)
    ready = {layers - i: ready for i, ready in enumerate(ready_s)}
    p = {layers - i: size for i, size in enumerate(nbytes)}
    t_c = {layer: a + b * size for layer, size in p.items()}

    def calculate_comm_start():
        tau_c = {layers: ready[layers]}
        for layer in range(layers - 1, 0, -1):
            tau_c[layer] = max(tau_c[layer + 1] + t_c[layer + 1], ready[layer])
        return tau_c

    tau_c = calculate_comm_start()
    merged = set()
    for layer in range(layers, 1, -1):
        if ready[layer - 1] - tau_c[layer] < a:
            t_c[layer] = 0.0
            p[layer - 1] += p[layer]
            t_c[layer - 1] = a + b * p[layer - 1]
            tau_c = calculate_comm_start()
            merged.add(layer)
    lengths, length = [], 0
    for layer in range(layers, 0, -1):
        length += 1
        if layer not in merged:
            lengths.append(length)
            length = 0
    return lengths


# Binary fractions add without rounding, so that both sides see the same ties.
exact_lines = st.builds(
    Line,
    startup_s=st.sampled_from([0.0, 0.25, 0.5, 2.0]),
    s_per_byte=st.sampled_from([0.0, 1 / 1024, 1 / 64]),
)


@given(
    sizes=st.lists(st.sampled_from([1, 2, 64, 1000]), min_size=1, max_size=25),
    line=exact_lines,
    data=st.data(),
)
@examples(200)
def test_mgwfbp_is_algorithm_1_as_printed(sizes, line, data):
    gaps = st.lists(
        st.sampled_from([0.0, 0.125, 0.5, 1.0]), min_size=len(sizes), max_size=len(sizes)
    )
    ready_s = (0.125 + np.cumsum(data.draw(gaps))).tolist()
    trace = Trace(
        name="drawn",
        origin="estimated",
        source="drawn",
        batch_size=1,
        tensors=tuple(
            Tensor(name=f"t{i}", elements=size, bytes_per_element=1, ready_s=ready, forward_s=0)
            for i, (size, ready) in enumerate(zip(sizes, ready_s, strict=True))
        ),
    )
    assert mgwfbp(trace, line) == algorithm_1_as_printed(
        ready_s, sizes, line.startup_s, line.s_per_byte
    )


@given(trace=traces(most=20), curve=curves())
@examples(30)
def test_mgwfbp_plans_on_the_line_of_least_squares_of_a_curve(trace, curve):
    sizes, seconds = np.array(curve.nbytes, dtype=float), np.array(curve.measured_s)
    assert mgwfbp(trace, curve) == mgwfbp(trace, least_squares(sizes, seconds))


@pytest.mark.parametrize(
    ("workers", "papers_startup_s"), [(2, 90.52e-6), (4, 271.56e-6), (8, 633.64e-6)]
)
def test_start_ups_come_close_to_the_papers_only_by_least_squares(workers, papers_startup_s):
    """INFOCOM, text on Fig. 5(b): what its authors fitted to these very points."""
    curve = load_network("mpi-10gbe-measured").cost("all-reduce", "native", workers=workers)
    assert curve.line(1.0, least_squares).startup_s == pytest.approx(papers_startup_s, rel=0.2)
    assert curve.line(1.0).startup_s < papers_startup_s / 2


@pytest.mark.parametrize(
    ("planner", "lengths"),
    [
        ("naive", [1, 1, 1]),
        ("wfbp", [1, 1, 1]),
        ("single", [3]),
        ("fixed:400B", [1, 2]),  # c alone has 400 bytes and closes its bucket
        ("fixed:401B", [2, 1]),
        ("ddp", [3]),
        ("inductor", [3]),
        ("inductor:404B", [2, 1]),  # a alone is too large for any bucket, and has its own
        ("inductor:403B", [1, 1, 1]),
    ],
)
def test_baselines(planner, lengths, small_trace, linked_network):
    plan = make_plan(small_trace, linked_network, workers=2, planner=planner)
    assert list(plan.lengths) == lengths
    assert plan.overlap == (planner != "naive")


def test_ddp_buckets_have_a_small_first_one():
    trace = load_trace("resnet50")
    plan = make_plan(trace, load_network("k80-10gbe"), workers=4, planner="ddp")
    sizes = np.add.reduceat(trace.nbytes, np.cumsum((0, *plan.lengths))[:-1])
    assert 2**20 <= sizes[0] < 2**20 + trace.nbytes.max()
    assert all(size >= 25 * 2**20 for size in sizes[1:-1])


def test_a_compiler_does_not_mix_types(small_trace, linked_network):
    c, b, a = small_trace.tensors
    mixed = replace(small_trace, tensors=(c, b, replace(a, bytes_per_element=2)))
    assert make_plan(mixed, linked_network, workers=2, planner="inductor").lengths == (2, 1)


@pytest.mark.parametrize("collective", ["parameter-server", "parameter-server:3"])
def test_planning_for_push_and_pull(collective, small_trace, linked_network):
    plan = make_plan(
        small_trace, linked_network, workers=3, collective=collective, planner="optimal:0"
    )
    cost = linked_network.cost("all-reduce", collective, workers=3)
    assert end_of_communication_s(small_trace, list(plan.lengths), cost) == pytest.approx(
        optimum_by_brute_force_s(small_trace, cost)
    )
    assert {bucket.collective for bucket in plan.buckets} == {collective}


def test_half_the_bytes_never_take_longer():
    network = load_network("cluster2-16xv100-10gbe")
    cost = network.cost("all-reduce", "native", workers=16)
    for name in ("resnet50", "densenet201"):
        full = load_trace(name)
        half = full.with_bytes_per_element(2)
        assert half.nbytes.sum() == full.nbytes.sum() / 2
        assert end_of_communication_s(
            half, optimal(half, cost, tolerance=0), cost
        ) <= end_of_communication_s(full, optimal(full, cost, tolerance=0), cost)


def test_a_measured_curve_is_planned_better_on_the_curve_than_on_its_line():
    trace = load_trace("googlenet-k80").rescaled(backward_s=0.02)
    network = load_network("mpi-10gbe-measured")
    curve = network.cost("all-reduce", "native", workers=8)
    assert isinstance(curve, Curve)
    on_line = optimal(trace, curve.line(1.0), tolerance=0)
    on_curve = optimal(trace, curve, tolerance=0)
    assert end_of_communication_s(trace, on_curve, curve) < end_of_communication_s(
        trace, on_line, curve
    )


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("fastest", "no planner 'fastest'; there are ddp, optimal"),
        ("optimla", r"no planner 'optimla', did you mean optimal\? There are ddp, optimal"),
        ("mg-wfbp", r"no planner 'mg-wfbp', did you mean mgwfbp\?"),
        ("wfbp:3", "'wfbp' takes no argument, got '3'"),
        ("fixed", "needs a size, such as fixed:25MiB"),
        ("fixed:big", "'big' is not a size"),
        ("fixed:0B", "at least one byte"),
        ("fixed:25", "'25' is not a size without its unit; write 25MiB, or 25B for bytes"),
        ("inductor:big", "'big' is not a size"),
        ("optimal:-1", "tolerance from 0 to 1"),
        ("optimal:nan", "tolerance from 0 to 1"),
        ("optimal:1e308", "tolerance from 0 to 1"),
        ("optimal:x", "tolerance from 0 to 1"),
    ],
)
def test_planners_that_do_not_exist(name, complaint):
    with pytest.raises(RequestError, match=complaint):
        find_planner(name)


def test_with_one_worker_every_plan_is_equally_good(small_trace):
    """Nothing is sent, so the fewest messages are one."""
    plan = make_plan(small_trace, load_network("cluster1-16xk80-10gbe"), workers=1)
    assert plan.lengths == (3,)


@pytest.mark.parametrize("exchange", EXCHANGE_NAMES)
@pytest.mark.parametrize("model", ["googlenet-k80", "resnet50"])
def test_thinned_out_gradients_travel_alike_whatever_their_width(model, exchange):
    """Values are carried in float32, so what counts is how many gradients there are."""
    network, compression = load_network("gtopk-1gbe"), f"{exchange}:0.001"
    wide = load_trace(model)
    narrow = wide.with_bytes_per_element(2)
    plans = [
        make_plan(trace, network, workers=32, compression=compression) for trace in (wide, narrow)
    ]
    assert plans[0] == plans[1]
    ends = [
        simulate(trace, plan, network, workers=32).iteration_s
        for trace, plan in zip((wide, narrow), plans, strict=True)
    ]
    assert ends[0] == pytest.approx(ends[1])
    dense = make_plan(narrow, network, workers=32)
    travels = (Travel("ring", compression_of(compression)), Travel("ring"))
    among = plan_among(narrow, network, travels, workers=32)
    best_s = simulate(narrow, among, network, workers=32).iteration_s
    assert best_s <= min(ends[1], simulate(narrow, dense, network, workers=32).iteration_s) * 1.01


@pytest.mark.parametrize(
    ("widths", "compression", "complaint"),
    [
        ((2, 4), "gtopk:0.01", "gtopk:0.01 is priced for gradients that all have 2 .* got 2 and 4"),
        ((8, 8), "gtopk:0.01", "all have 2 or all have 4 bytes, got 8"),
        ((2, 2), "bf16", "bf16 is priced for gradients of 4 bytes only"),
    ],
)
def test_widths_without_a_price(small_trace, widths, compression, complaint):
    first, second, *_ = small_trace.tensors
    tensors = tuple(
        replace(tensor, bytes_per_element=width)
        for tensor, width in zip((first, second), widths, strict=True)
    )
    with pytest.raises(RequestError, match=complaint):
        make_plan(
            replace(small_trace, tensors=tensors),
            load_network("gtopk-1gbe"),
            workers=4,
            compression=compression,
        )


@given(
    trace=traces(most=8),
    selection_s=st.sampled_from([0.0, 0.001, 0.05]),
    method=st.sampled_from(EXCHANGE_NAMES),
)
@examples(60)
def test_selecting_and_exchanging_are_planned_for_together(trace, selection_s, method):
    """Against brute force over whole simulated iterations."""
    trace = trace.with_bytes_per_element(4)
    link = Link(latency_s=0.25, s_per_byte=0.01)
    network = Network(
        name="drawn", source="drawn", links=flat(link), selection_s_per_element=selection_s
    )
    given = {"collective": "ring", "compression": Compression(method=method, density=0.1)}
    plan = make_plan(trace, network, workers=4, planner="optimal:0", **given)
    best_s = min(
        simulate(
            trace, merge(trace, lengths, planner="any", **given), network, workers=4
        ).iteration_s
        for lengths in all_mergings(len(trace.tensors))
    )
    assert simulate(trace, plan, network, workers=4).iteration_s == pytest.approx(best_s)


def test_dear_selection_begins_early():
    """Exchanges alone are merged; what it costs to select is better begun meanwhile."""
    tensors = tuple(
        Tensor(name=name, elements=1000, bytes_per_element=4, ready_s=ready_s, forward_s=0.1)
        for name, ready_s in (("b", 1.0), ("a", 3.0))
    )
    trace = Trace(name="t", origin="estimated", source="t", batch_size=1, tensors=tensors)
    link = Link(latency_s=0.25, s_per_byte=1e-6)
    network = Network(name="n", source="n", links=flat(link))
    sparse = Compression(method="gtopk", density=0.01)
    assert make_plan(trace, network, workers=2, compression=sparse).lengths == (2,)
    dear = replace(network, selection_s_per_element=0.01)
    plan = make_plan(trace, dear, workers=2, compression=sparse)
    spans = [s for s in simulate(trace, plan, dear, workers=2).spans if s.lane == "communication"]
    exchange_s = 0.25 + 2 * 4000 * 0.01 * 1e-6
    assert [(span.label, span.end_s - span.start_s) for span in spans] == [
        ("select 1", pytest.approx(10.0)),
        ("gtopk:0.01 1", pytest.approx(exchange_s)),
        ("select 2", pytest.approx(10.0)),
        ("gtopk:0.01 2", pytest.approx(exchange_s)),
    ]

"""The papers' tables, row by row, and laws that hold between rows."""

from math import log2, prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import curves

from gradweave import Compression, RequestError, UnknownCost
from gradweave._src.costs import (
    FORMULAS,
    FREE,
    Cheapest,
    Curve,
    Level,
    Line,
    Link,
    Links,
    Share,
    Times,
    Total,
    closed_form,
    fit,
    fit_line,
    flat,
    least_squares,
    sparse_closed_form,
    total_line,
)
from gradweave._src.costs.pipeline import OneWay, PipelineCost, ThereAndBack
from gradweave._src.simulation.schedule import simulate_schedule
from gradweave._src.sparse.exchange import EXCHANGES

A, B, G = 3e-5, 2e-9, 5e-10
LINK = Link(latency_s=A, s_per_byte=B, sum_s_per_byte=G)
POWERS_OF_TWO = [2, 4, 8, 64]


def line(operation, collective, workers, links=None):
    cost = closed_form(operation, collective, links or flat(LINK), workers)
    assert isinstance(cost, Line)
    return pytest.approx((cost.startup_s, cost.s_per_byte))


@pytest.mark.parametrize("n", POWERS_OF_TWO)
def test_journal_table_2_but_for_its_trees(n):
    assert line("all-reduce", "recursive-doubling", n) == (A * log2(n), (B + G) * log2(n))
    assert line("all-reduce", "halving-doubling", n) == (
        2 * A * log2(n),
        2 * B - (2 * B + G) / n + G,
    )
    assert line("all-reduce", "ring", n) == (
        2 * (n - 1) * A,
        2 * (n - 1) / n * B + (n - 1) / n * G,
    )


@pytest.mark.parametrize("p", POWERS_OF_TWO)
def test_linear_pipeline_table_1_without_the_pipeline(p):
    assert line("broadcast", "mst", p) == (log2(p) * A, log2(p) * B)
    assert line("reduce", "mst", p) == (log2(p) * A, log2(p) * (B + G))
    assert line("all-reduce", "mst", p) == (log2(p) * 2 * A, log2(p) * (2 * B + G))
    assert line("broadcast", "exchange", p) == ((log2(p) + p - 1) * A, 2 * (p - 1) / p * B)
    both = (2 * log2(p) * A, 2 * (p - 1) / p * B + (p - 1) / p * G)
    assert line("reduce", "exchange", p) == both
    assert line("all-reduce", "exchange", p) == both


@pytest.mark.parametrize("p", [2, 3, 4, 17])
@pytest.mark.parametrize("blocks", [2, 500])
def test_linear_pipeline_table_1_with_a_given_block(p, blocks):
    """One step less than the table has: as many as in the paper's Fig. 2."""
    b = 65536
    for operation, per_byte in {"broadcast": B, "reduce": B + G}.items():
        cost = closed_form(operation, "linear-pipeline:64KiB", flat(LINK), p)
        table_s = (p - 1 + blocks) * A + (b * (p - 1) + b * blocks) * per_byte
        assert cost.seconds(np.array([float(b * blocks)])) == pytest.approx(
            table_s - (A + b * per_byte)
        )


@pytest.mark.parametrize("p", [3, 4, 17])
def test_a_fused_all_reduce_fills_the_pipe_once(p):
    """Where blocks are many: the table's reduce and broadcast fill it twice."""
    b, blocks = 65536, 500
    cost = closed_form("all-reduce", "linear-pipeline:64KiB", flat(LINK), p)
    fused_s = cost.seconds(np.array([float(b * blocks)]))
    table_s = 2 * (p - 1 + blocks) * A + (b * (p - 1) + b * blocks) * (2 * B + G)
    spared_s = (p + 1) * (A + b * B) + 2 * (A + b * (B + G)) - 2 * (A + b * B)
    assert fused_s == pytest.approx(table_s - spared_s)


@given(
    workers=st.integers(2, 64),
    nbytes=st.floats(1, 1e9),
    latency_s=st.floats(0, 1e-2),
    s_per_byte=st.floats(1e-11, 1e-6),
    sum_s_per_byte=st.floats(0, 1e-6),
    blocks=st.integers(1, 10**6),
)
def test_no_other_number_of_blocks_is_better(
    workers, nbytes, latency_s, s_per_byte, sum_s_per_byte, blocks
):
    assume(blocks <= nbytes)
    size = np.array([nbytes])
    for passage in (
        OneWay(workers, latency_s, s_per_byte),
        ThereAndBack(workers, latency_s, s_per_byte, sum_s_per_byte),
    ):
        other_s = passage.seconds(size, np.array([float(blocks)]))
        assert PipelineCost(passage).seconds(size)[0] <= other_s[0] * (1 + 1e-9)


def test_a_block_is_never_larger_than_the_message():
    tiny = np.array([0.5, 1.0, 10.0])
    for block in (None, 1 << 20):
        assert (PipelineCost(OneWay(8, 1.0, 1e-9), block).blocks(tiny) == 1).all()


@pytest.mark.parametrize("n", [2, 3, 16])
def test_parameter_server(n):
    assert line("all-reduce", "parameter-server", n) == (
        2 * (n - 1) * A,
        2 * (n - 1) * B + (n - 1) * G,
    )
    assert line("reduce", "parameter-server:2", n) == ((n - 1) * A, (n - 1) / 2 * (B + G))
    assert line("broadcast", "parameter-server:2", n) == ((n - 1) * A, (n - 1) / 2 * B)


@pytest.mark.parametrize("p", POWERS_OF_TWO)
def test_gtopk_table_1(p):
    density = 0.001
    topk, gtopk = (
        sparse_closed_form(Compression(method=method, density=density), flat(LINK), p)
        for method in ("topk", "gtopk-tree")
    )
    assert (topk.startup_s, topk.s_per_byte) == pytest.approx(
        (log2(p) * A, 2 * (p - 1) * density * B)
    )
    assert (gtopk.startup_s, gtopk.s_per_byte) == pytest.approx(
        (2 * log2(p) * A, 4 * log2(p) * density * B)
    )


W0, W1, W2 = 32e9, 12.5e9, 25e9
TREE = Links(
    levels=tuple(
        Level(members=members, link=Link(latency_s=A, s_per_byte=1 / width))
        for members, width in [(3, W0), (2, W1), (None, W2)]
    )
)


def ring_pass(p, n, w):
    return (p - 1) * A + (p - 1) / p * n / w


def doubling_pass(p, n, w):
    return log2(p) * A + (p - 1) / p * n / w


def test_blueconnect_on_the_papers_three_level_example():
    """12 learners: 3 GPUs, 2 nodes, 2 switches (its Figs. 1 and 4, Eqs. 6, 7 and 9)."""
    n, slowest = 1e8, min(W0, W1, W2)
    expected_s = 2 * (
        ring_pass(3, n, W0)
        + doubling_pass(2, n / 3, min(W0, W1 / 3))
        + doubling_pass(2, n / 6, min(W0, W1 / 3, W2 / 6))
    )
    size = np.array([n])
    assert closed_form("all-reduce", "blueconnect", TREE, 12).seconds(size) == pytest.approx(
        expected_s
    )
    two_level_s = 2 * (
        log2_up(3) * A + 2 / 3 * n / W0 + ring_pass(3, n, W0) + doubling_pass(4, n, slowest)
    )
    assert closed_form("all-reduce", "two-level", TREE, 12).seconds(size) == pytest.approx(
        two_level_s
    )
    assert closed_form("all-reduce", "ring", TREE, 12).seconds(size) == pytest.approx(
        2 * ring_pass(12, n, slowest)
    )


def log2_up(workers):
    return int(np.ceil(np.log2(workers)))


def test_blueconnect_on_a_torus():
    """Only the GPUs of one node share its links (Eq. 10)."""
    n = 1e8
    torus = Links(levels=TREE.levels, topology="torus")
    expected_s = 2 * (
        ring_pass(3, n, W0)
        + doubling_pass(2, n / 3, min(W0, W1 / 3))
        + doubling_pass(2, n / 6, min(W0, W1 / 3, W2 / 3))
    )
    cost = closed_form("all-reduce", "blueconnect", torus, 12)
    assert cost.seconds(np.array([n])) == pytest.approx(expected_s)


@pytest.mark.parametrize("collective", ["blueconnect", "two-level"])
def test_without_a_factorisation_there_is_one_ring(collective):
    adding = Links(levels=(*TREE.levels[:-1], Level(members=None, link=LINK)))
    assert (
        line("all-reduce", collective, 11, adding)
        == line("all-reduce", "ring", 11, adding).expected
    )


@pytest.mark.parametrize("workers", [3, 5, 8])
def test_blueconnect_on_one_tier_is_what_that_tier_does(workers):
    """Adding is paid for alike, whatever the algorithm is called."""
    same = "halving-doubling" if workers == 8 else "ring"
    assert line("all-reduce", "blueconnect", workers) == line("all-reduce", same, workers).expected


@pytest.mark.parametrize("collective", ["halving-doubling", "mst", "double-tree", "exchange"])
def test_formulas_that_do_not_know_shared_uplinks_refuse_tiers(collective):
    closed_form("all-reduce", collective, TREE, 3)
    with pytest.raises(UnknownCost, match="12 workers span several tiers; take ring"):
        closed_form("all-reduce", collective, TREE, 12)


@given(workers=st.integers(1, 300))
def test_factors_multiply_to_the_workers(workers):
    factors = TREE.factors(workers)
    if factors is None:
        assert workers > 3
        assert workers % 3 or (workers // 3) % 2
    else:
        assert prod(factors) == workers
        assert len(factors) == 3


@pytest.mark.parametrize("half", ["ring", "halving-doubling"])
@pytest.mark.parametrize("workers", [2, 3, 5, 8, 33])
def test_reduce_scatter_and_all_gather_make_an_all_reduce(half, workers):
    scatter = closed_form("reduce-scatter", half, flat(LINK), workers)
    gather = closed_form("all-gather", half, flat(LINK), workers)
    whole = closed_form("all-reduce", half, flat(LINK), workers)
    sizes = np.array([1.0, 1e3, 1e8])
    assert scatter.seconds(sizes) + gather.seconds(sizes) == pytest.approx(whole.seconds(sizes))


@pytest.mark.parametrize("collective", [c for op, c in FORMULAS if op == "all-reduce"])
def test_no_price_is_below_the_bandwidth_bound(collective):
    """Every worker must send 2 (N-1)/N of the message; the journal's double tree forgets that."""
    nbytes = 1e12
    link = Link(latency_s=A, s_per_byte=B)
    for workers in range(2, 34):
        cost = closed_form("all-reduce", collective, flat(link), workers)
        bound_s = 2 * (workers - 1) / workers * B * nbytes
        assert cost.seconds(np.array([nbytes]))[0] >= bound_s * (1 - 1e-9), workers


@pytest.mark.parametrize(
    ("operation", "collective", "error", "complaint"),
    [
        ("broadcast", "ring", UnknownCost, "no formula for broadcast by 'ring'; there are linear"),
        ("all-reduce", "rign", UnknownCost, r"for all-reduce by 'rign', did you mean ring\?"),
        ("all-reduce", "ring:3", RequestError, "'ring' takes no argument, got '3'"),
        ("all-reduce", "parameter-server:0", RequestError, "expected 1 to 4 servers"),
        ("all-reduce", "parameter-server:5", RequestError, "expected 1 to 4 servers"),
        ("all-reduce", "parameter-server:x", RequestError, "expected 1 to 4 servers"),
        ("reduce", "linear-pipeline:much", RequestError, "'much' is not a size"),
    ],
)
def test_what_has_no_formula(operation, collective, error, complaint):
    with pytest.raises(error, match=complaint):
        closed_form(operation, collective, flat(LINK), 4)


def test_a_curve_between_before_and_beyond_its_points():
    curve = Curve(nbytes=(10, 20, 40, 60), measured_s=(1.0, 3.0, 2.0, 5.0))
    asked = np.array([1.0, 10.0, 15.0, 20.0, 30.0, 60.0, 70.0])
    # Of 1, 2 and 4 bytes the last octave is from 2 to 4.
    assert Curve(nbytes=(1, 2, 4), measured_s=(1.0, 1.0, 3.0)).seconds(5) == 4.0
    # The last octave is from 20 to 60 bytes: its slope is 2 / 40.
    assert curve.seconds(asked).tolist() == pytest.approx([1, 1, 2, 3, 2.5, 5, 5.5])
    assert curve.known_to_bytes == 60


@given(curve=curves())
def test_a_curve_passes_through_its_points(curve):
    asked = np.array(curve.nbytes, dtype=float)
    assert curve.seconds(asked).tolist() == pytest.approx(list(curve.measured_s))


@pytest.mark.parametrize("fitting", [fit_line, least_squares])
@given(startup_s=st.floats(1e-6, 10), s_per_byte=st.floats(0, 1))
def test_fitting_a_line_finds_it_again(fitting, startup_s, s_per_byte):
    sizes = np.array([1.0, 10.0, 500.0, 1000.0])
    fitted = fitting(sizes, startup_s + s_per_byte * sizes)
    assert fitted.startup_s == pytest.approx(startup_s, abs=1e-6)
    assert fitted.s_per_byte == pytest.approx(s_per_byte, abs=1e-8)


def test_a_fitted_line_is_never_negative():
    sizes = np.array([1.0, 2.0, 3.0])
    assert fit_line(sizes, np.array([0.1, 1.0, 3.0])).startup_s == 0
    falling = fit_line(sizes, np.array([3.0, 2.0, 1.0]))
    assert falling.s_per_byte == 0
    # The constant whose relative errors are least: sum(1/y) / sum(1/y^2).
    assert falling.startup_s == pytest.approx((1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1))
    through_zero = least_squares(sizes, np.array([0.1, 1.0, 3.0]))
    assert through_zero.startup_s == 0
    assert through_zero.s_per_byte == pytest.approx((0.1 + 2 + 9) / (1 + 4 + 9))
    assert least_squares(sizes, np.array([3.0, 2.0, 1.0])) == Line(startup_s=2, s_per_byte=0)


@given(curve=curves(), startup=st.floats(0.5, 1.5), per_byte=st.floats(0.5, 1.5))
def test_no_other_line_has_less_squared_errors(curve, startup, per_byte):
    sizes, seconds = np.array(curve.nbytes, dtype=float), np.array(curve.measured_s)
    best = least_squares(sizes, seconds)
    other = Line(startup_s=startup * best.startup_s, s_per_byte=per_byte * best.s_per_byte)

    def squared(line):
        return ((seconds - line.seconds(sizes)) ** 2).sum()

    assert squared(best) <= squared(other) * (1 + 1e-9)


def test_how_well_a_line_describes_points():
    straight = fit(Curve(nbytes=(1, 11, 101), measured_s=(2.0, 3.0, 12.0)))
    assert straight.worst_residual == pytest.approx(0, abs=1e-9)
    assert straight.r_squared == pytest.approx(1)
    knee = fit(Curve(nbytes=(1, 100, 200, 1000), measured_s=(1.0, 1.0, 4.0, 20.0)))
    assert knee.worst_residual > 0.25
    assert 0.5 < knee.r_squared < 1


def test_small_messages_count_in_a_fit_like_large_ones():
    """An error of a tenth at the largest must not swallow the start-up of the smallest."""
    curve = Curve(nbytes=(1, 10, 10**6), measured_s=(0.01, 0.01, 1.1))
    assert fit(curve).line.startup_s == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("nbytes", "measured_s", "complaint"),
    [
        ((1,), (1.0,), "at least two entries"),
        ((1, 2), (1.0,), "2 entries and measured_s 1"),
        ((0, 2), (1.0, 2.0), "must be positive, got 0"),
        ((2, 2), (1.0, 2.0), "must increase, got 2 after 2"),
        ((1, 2), (1.0, float("nan")), "at 2 bytes must be positive, got nan"),
        ((1, 2), (2.0, 1.0), "falls over the last octave, slope -1"),
    ],
)
def test_curves_that_cannot_be(nbytes, measured_s, complaint):
    with pytest.raises(ValueError, match=complaint):
        Curve(nbytes=nbytes, measured_s=measured_s)


def test_workers_inside_one_group_do_not_pay_for_links_between_groups():
    assert TREE.slowest(3).s_per_byte == 1 / W0
    assert TREE.slowest(6).s_per_byte == 1 / W1
    assert TREE.slowest(12).s_per_byte == 1 / W1
    assert TREE.slowest(1).s_per_byte == 1 / W0


@pytest.mark.parametrize("method", EXCHANGES)
def test_exchanges_are_priced_as_they_run(method):
    """A vector is as long as the values and indices of the share that travels."""
    density, dense_bytes = 0.25, 4000
    links = flat(Link(latency_s=A, s_per_byte=B))
    for p in range(2, 34):
        schedule = EXCHANGES[method].schedule(p)
        simulated_s = simulate_schedule(
            schedule, links, nbytes=schedule.blocks * int(2 * density * dense_bytes)
        )
        priced = sparse_closed_form(Compression(method=method, density=density), links, p)
        priced_s = priced.startup_s + priced.s_per_byte * dense_bytes
        assert priced_s == pytest.approx(simulated_s), p


TIERS_OF_FORTY = Links(
    levels=(
        Level(members=4, link=Link(latency_s=1e-6, s_per_byte=1e-10)),
        Level(members=10, link=Link(latency_s=1e-5, s_per_byte=1e-9)),
        Level(members=None, link=Link(latency_s=1e-5, s_per_byte=1e-10)),
    )
)


@pytest.mark.parametrize(
    ("name", "workers", "complaint"),
    [
        (
            "blueconnect:pat",
            42,
            "42 workers do not fill the tiers of 4, 10 and any number of members evenly",
        ),
        ("blueconnect:ring/pat", 80, "expected one name for all tiers or 3 separated by slashes"),
        ("blueconnect:magic", 80, "no formula for 'magic'; there are ring, halving-doubling, pat"),
        ("pat", 80, "'pat' has a formula for equal links only"),
    ],
)
def test_tiers_that_have_no_price(name, workers, complaint):
    with pytest.raises(UnknownCost, match=complaint):
        closed_form("all-reduce", name, TIERS_OF_FORTY, workers)


def test_links_without_tiers_are_refused():
    with pytest.raises(ValueError, match="levels must not be empty"):
        Links(levels=())


@pytest.mark.parametrize("name", ["blueconnect", "blueconnect:pat", "blueconnect:ring/pat/ring"])
def test_both_halves_by_tiers_are_an_all_reduce(name):
    whole, *halves = (
        closed_form(operation, name, TIERS_OF_FORTY, 400)
        for operation in ("all-reduce", "reduce-scatter", "all-gather")
    )
    together = total_line(*halves)
    assert together.startup_s == pytest.approx(whole.startup_s)
    assert together.s_per_byte == pytest.approx(whole.s_per_byte)


@pytest.mark.parametrize(("operation", "collective"), FORMULAS)
def test_one_size_costs_one_number(operation, collective):
    cost = closed_form(operation, collective, flat(LINK), 4)
    assert_one_number(cost)


@pytest.mark.parametrize("cost", [Curve(nbytes=(10, 20), measured_s=(1.0, 3.0)), FREE])
def test_one_size_of_what_is_made_of_others_costs_one_number(cost):
    for made in (Total((cost, cost)), Share(cost, 0.5), Cheapest((cost, FREE)), Times(2.0, cost)):
        assert_one_number(made)


def assert_one_number(cost):
    seconds = cost.seconds(5000)
    assert isinstance(seconds, float)
    assert [seconds] == cost.seconds(np.array([5000.0])).tolist()

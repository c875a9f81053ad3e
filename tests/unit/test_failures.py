"""How often to write a checkpoint: the best interval, and a training whose failures are drawn."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave import RequestError
from gradweave._src.simulation import Failures, survival
from gradweave._src.simulation.failures import best_interval_s, goodput


def drawn_goodput(failures, interval_s, *, workers, intervals, seed=0):
    """The useful share of so many intervals, with every failure drawn at random."""
    random = np.random.default_rng(seed)

    def until_failure_s():
        return random.exponential(failures.job_mtbf_s(workers))

    needed_s = interval_s + failures.checkpoint_s
    elapsed_s = 0.0
    for _ in range(intervals):
        while (failed_after_s := until_failure_s()) < needed_s:
            elapsed_s += failed_after_s
            while (failed_after_s := until_failure_s()) < failures.restart_s:
                elapsed_s += failed_after_s
            elapsed_s += failures.restart_s
        elapsed_s += needed_s
    return intervals * interval_s / elapsed_s


@pytest.mark.parametrize(
    ("mtbf_s", "restart_s", "checkpoint_s", "interval_s"),
    [(1000.0, 0.0, 10.0, 140.0), (1000.0, 300.0, 50.0, 300.0), (100.0, 50.0, 20.0, 60.0)],
)
def test_the_formula_is_what_drawn_failures_come_to(mtbf_s, restart_s, checkpoint_s, interval_s):
    failures = Failures(rank_mtbf_s=8 * mtbf_s, restart_s=restart_s, checkpoint_s=checkpoint_s)
    drawn = drawn_goodput(failures, interval_s, workers=8, intervals=40_000)
    assert goodput(failures, interval_s, workers=8) == pytest.approx(drawn, rel=0.02)


@given(
    mtbf_s=st.floats(1, 1e7),
    share=st.floats(1e-6, 5),
    restart_s=st.floats(0, 1e4),
    other=st.floats(0.01, 100),
)
def test_no_other_interval_is_better(mtbf_s, share, restart_s, other):
    failures = Failures(rank_mtbf_s=mtbf_s, restart_s=restart_s, checkpoint_s=share * mtbf_s)
    best = survival(failures, workers=1)
    rival = goodput(failures, other * best.interval_s, workers=1)
    assert rival <= best.goodput * (1 + 1e-9)
    assert 0 <= best.goodput < 1


def test_where_checkpoints_are_cheap_the_best_is_youngs():
    found = survival(Failures(rank_mtbf_s=1e9, checkpoint_s=1.0), workers=10)
    assert found.young_interval_s == sqrt(2 * 1e8)
    assert found.interval_s == pytest.approx(found.young_interval_s, rel=1e-4)


def test_where_they_are_dear_it_stays_below_the_time_between_failures():
    assert 0.99 * 100 < best_interval_s(100.0, 1000.0) < 100


def test_more_workers_lose_more():
    failures = Failures(rank_mtbf_s=5e4 * 3600, restart_s=300, checkpoint_s=30)
    goodputs = [survival(failures, workers=n).goodput for n in (1, 10, 1000, 10_000, 100_000)]
    assert goodputs == sorted(goodputs, reverse=True)
    assert goodputs[0] > 0.999
    assert goodputs[-1] < 0.8


def test_free_checkpoints_lose_only_restarts():
    assert survival(Failures(rank_mtbf_s=100.0), workers=3).goodput == 1.0


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"rank_mtbf_s": 0.0}, "rank_mtbf_s must be positive, got 0.0"),
        ({"rank_mtbf_s": -1.0}, "rank_mtbf_s must be positive, got -1.0"),
        ({"rank_mtbf_s": 1.0, "restart_s": -1.0}, "restart_s must be a number >= 0, got -1.0"),
        ({"rank_mtbf_s": 1.0, "checkpoint_s": -2.0}, "checkpoint_s must be a number >= 0"),
    ],
)
def test_what_cannot_be(wrong, complaint):
    with pytest.raises(RequestError, match=complaint):
        Failures(**wrong)

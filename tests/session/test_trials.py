"""A challenger and what it is to replace, in turn: when it is clear, and who stays."""

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from gradweave._src.plan import Bucket, Plan
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.trials import (
    CLEAR_AT_ONCE,
    MOST_VISITS,
    TRIAL_NOISE,
    Outcome,
    Trial,
    Visit,
    outcome,
    times_as_fast,
)

times_s = st.floats(0.1, 10.0)


@pytest.mark.parametrize(
    ("challenger_s", "champion_s", "expected"),
    [
        ([0.90], [1.0], Outcome.FASTER),
        ([0.96], [1.0], Outcome.CLOSE),
        ([1.30], [1.0], Outcome.CLOSE),  # it was expected to be faster: chance may have slowed it
        ([1.30, 1.10], [1.0, 1.0], Outcome.NOT_FASTER),
        ([0.96, 0.96], [1.0, 1.0], Outcome.FASTER),
        ([0.985, 0.985], [1.0, 1.0], Outcome.CLOSE),
        ([0.985, 0.985, 0.985], [1.0, 1.0, 1.0], Outcome.FASTER),
        ([0.995, 0.995, 0.995], [1.0, 1.0, 1.0], Outcome.NOT_FASTER),
    ],
)
def test_a_clear_gain_ends_it_and_what_was_there_stays_otherwise(
    challenger_s, champion_s, expected
):
    assert outcome(challenger_s, champion_s) is expected


def test_what_was_seen_once_must_be_clear_also_at_the_end():
    assert outcome([0.97], [1.0], is_last=True) is Outcome.NOT_FASTER
    assert outcome([0.90], [1.0], is_last=True) is Outcome.FASTER
    assert outcome([0.985, 0.985], [1.0, 1.0], is_last=True) is Outcome.FASTER


def test_a_machine_that_slows_down_slows_down_both():
    assert outcome([1.1, 2.2], [1.0, 2.0]) is Outcome.NOT_FASTER
    assert outcome([0.9, 1.8], [1.0, 2.0]) is Outcome.FASTER


def test_who_took_longer_does_not_win_by_differences():
    """Two of these three are of one lucky visit."""
    assert outcome([0.96, 1.2], [1.0, 1.0]) is Outcome.CLOSE
    assert outcome([0.96, 1.2, 1.2], [1.0, 1.0, 1.0]) is Outcome.NOT_FASTER


@given(visits=st.lists(st.tuples(times_s, times_s), min_size=1, max_size=MOST_VISITS))
def test_nobody_wins_who_took_longer(visits):
    challenger_s, champion_s = zip(*visits, strict=True)
    if outcome(challenger_s, champion_s) is Outcome.FASTER:
        assert sum(challenger_s) < sum(champion_s)


def test_random_visits_are_won():
    """By somebody who was not faster in each of them, too; otherwise the law would say little."""

    def is_won(visits):
        challenger_s, champion_s = zip(*visits, strict=True)
        is_faster = outcome(challenger_s, champion_s) is Outcome.FASTER
        return is_faster and any(one_s > other_s for one_s, other_s in visits)

    several = st.lists(st.tuples(times_s, times_s), min_size=1, max_size=MOST_VISITS)
    find(several, is_won, settings=settings(phases=[Phase.generate], max_examples=5000))


@given(visits=st.lists(st.tuples(times_s, times_s), min_size=1, max_size=MOST_VISITS))
def test_it_comes_to_an_end(visits):
    challenger_s, champion_s = zip(*visits, strict=True)
    result = outcome(challenger_s, champion_s)
    assert result is not Outcome.CLOSE or len(visits) < MOST_VISITS


@given(
    champion_s=times_s,
    share=st.floats(0.5, 1 - CLEAR_AT_ONCE - 1e-9),
    visits=st.integers(1, MOST_VISITS),
)
def test_without_noise_a_clear_gain_wins_at_once(champion_s, share, visits):
    assert outcome([champion_s * share] * visits, [champion_s] * visits) is Outcome.FASTER


@given(champion_s=times_s, share=st.floats(1.0, 1.5), visits=st.integers(1, MOST_VISITS))
def test_without_noise_nobody_wins_who_is_not_faster(champion_s, share, visits):
    result = outcome([champion_s * share] * visits, [champion_s] * visits)
    assert result is not Outcome.FASTER


@given(
    champion_s=times_s,
    difference=st.floats(2 * TRIAL_NOISE, 0.5, exclude_min=True),
    is_faster=st.booleans(),
)
def test_without_noise_the_faster_one_wins_in_the_end(champion_s, difference, is_faster):
    share = 1 - difference if is_faster else 1 + difference
    result = outcome([champion_s * share] * MOST_VISITS, [champion_s] * MOST_VISITS)
    assert result is (Outcome.FASTER if is_faster else Outcome.NOT_FASTER)


def trial(*, noted_s=(), plain_s=()):
    visits = [
        Visit(steps_s=(step_s,), is_noted=is_noted)
        for is_noted, steps_s in ((True, noted_s), (False, plain_s))
        for step_s in steps_s
    ]
    bucket = Bucket(tensors=("a",), collective="native")
    candidate = Candidate(plan=Plan(planner="made", buckets=(bucket,)), predicted_s=1.0)
    return Trial(candidate=candidate, visits=tuple(visits))


@pytest.mark.parametrize(
    ("chosen", "baseline", "times"),
    [
        (trial(noted_s=[4.0], plain_s=[2.0]), trial(noted_s=[9.0], plain_s=[6.0]), 3.0),
        (trial(noted_s=[4.0], plain_s=[2.0]), trial(noted_s=[8.0]), 2.0),  # the hook is in both
        (trial(noted_s=[2.0], plain_s=[4.0]), trial(noted_s=[8.0]), 2.0),  # it was another time
        (trial(noted_s=[4.0]), trial(noted_s=[8.0]), 2.0),
        (trial(plain_s=[4.0]), trial(noted_s=[8.0]), 2.0),
    ],
)
def test_what_only_a_hook_takes_is_no_gain(chosen, baseline, times):
    assert times_as_fast(chosen, baseline) == times

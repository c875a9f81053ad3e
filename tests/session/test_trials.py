"""Which candidates are tried twice, and which one wins."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gradweave.plan import Bucket, Plan
from gradweave.session.candidates import Candidate
from gradweave.session.trials import MOST_RIVALS, Trial, finalists, winner


def first_round(ours_s, torchs_s, predicted_s=None):
    """Torch's own buckets are the last."""
    predicted_s = predicted_s or [1.0] * (len(ours_s) + 1)
    return [
        Trial(
            candidate=Candidate(
                plan=Plan(
                    planner=f"plan {number}",
                    buckets=(Bucket(tensors=("w",), collective="native"),),
                ),
                predicted_s=predicted_s[number],
                is_baseline=number == len(ours_s),
            ),
            rounds_s=(step_s,),
        )
        for number, step_s in enumerate([*ours_s, torchs_s])
    ]


def names(candidates):
    return [candidate.plan.planner for candidate in candidates]


def test_the_close_ones_are_tried_again_the_other_way_round():
    assert names(finalists(first_round([1.01, 1.04, 1.00, 1.10], 1.3))) == [
        "plan 4",
        "plan 2",
        "plan 0",
    ]


def test_torchs_own_alone_needs_no_second_round():
    trials = first_round([1.2, 1.3], 1.0)
    assert finalists(trials) == []
    assert winner(trials).candidate.is_baseline


def test_of_equals_the_better_prediction_wins():
    trials = first_round([0.500, 0.504, 0.510], 1.0, predicted_s=[0.40, 0.38, 0.10, 0.9])
    assert winner(trials).candidate.plan.planner == "plan 1"


def test_a_better_prediction_does_not_win_over_torchs_own():
    trials = first_round([1.005], 1.0, predicted_s=[0.5, 1.0])
    assert winner(trials).candidate.is_baseline


times_s = st.floats(0.9, 1.1)


@given(data=st.data(), ours_s=st.lists(times_s, max_size=4), torchs_s=times_s)
def test_no_winner_is_slower_than_torchs_own(data, ours_s, torchs_s):
    predicted_s = data.draw(st.lists(times_s, min_size=5, max_size=5))
    trials = first_round(ours_s, torchs_s, predicted_s)
    again = finalists(trials)
    assert len(again) <= MOST_RIVALS + 1
    if again:
        assert again[0].is_baseline
        assert min(trials, key=lambda trial: trial.step_s).candidate in again
    trials = [
        replace(trial, rounds_s=(*trial.rounds_s, data.draw(times_s)))
        if trial.candidate in again
        else trial
        for trial in trials
    ]
    best = winner(trials)
    assert best.candidate in again or best.candidate.is_baseline
    assert best.step_s <= trials[-1].step_s

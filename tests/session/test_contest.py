"""Which plan stays: who challenges whom, when it is clear, and what is said of it."""

import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from on_paper import Owner, density_at, owner, scripted, times_s

from gradweave._src.advice import faster_with_same_batch
from gradweave._src.session.commands import (
    FindCandidates,
    Recorded,
    TakeSteps,
)
from gradweave._src.session.explain import explanation
from gradweave._src.session.session import Session
from gradweave._src.session.task import PlanningTask

APART = {"baseline_caps_bytes": (1, 1)}  # a bucket for each tensor


@pytest.fixture
def hurried_trace(small_trace):
    """Whose messages nothing hides, so that fewer of them are a gain."""
    return small_trace.rescaled(backward_s=0.01)


def is_baseline(driven):
    return driven.sent == tuple(driven.baseline_lengths())


def visits(driven):
    """Of the baseline and of what was tried first: whether messages were noted, visit by visit."""
    trials = driven.session.findings.trials
    return [[visit.is_noted for visit in trial.visits] for trial in trials[:2]]


def test_a_clear_gain_is_confirmed_without_the_baseline(hurried_trace):
    driven = scripted(hurried_trace, lambda now: 1.0 if is_baseline(now) else 0.7, **APART)
    found = driven.session.findings
    assert visits(driven) == [[True], [True, False]]
    assert (found.step_s, found.baseline_step_s) == (0.7, 1.0)
    assert found.gain == pytest.approx(1 / 0.7)


def test_a_smaller_gain_is_shown_beside_the_baseline_again(hurried_trace):
    driven = scripted(hurried_trace, lambda now: 1.0 if is_baseline(now) else 0.9, **APART)
    assert visits(driven) == [[True, False], [True, False, False]]
    assert driven.session.findings.plan.planner != "ddp"


def test_what_only_a_hook_makes_slow_is_kept(hurried_trace):
    """The baseline is faster than everything else once nobody notes its messages."""

    def step_s(now):
        if is_baseline(now):
            return 1.0 if now.notes_messages else 0.88
        return 0.92

    found = scripted(hurried_trace, step_s, **APART).session.findings
    assert found.plan.planner == "ddp"
    assert found.note == "nothing that was tried is faster than torch's own buckets"
    assert found.step_s == found.baseline_step_s == 0.88


def test_a_machine_that_slows_down_makes_nobody_hopeless(hurried_trace):
    """The challenger is 3.5 % faster in each turn, and both take 25 % longer in the second."""
    turns = {True: 0, False: 0}

    def step_s(now):
        mine = is_baseline(now)
        turns[mine] += 0.5  # there are two steps in a turn
        return (1.0 if turns[mine] <= 1 else 1.25) * (1.0 if mine else 0.965)

    driven = scripted(hurried_trace, step_s, **APART)
    assert driven.session.findings.plan.planner != "ddp"


def test_it_ends_with_what_would_be_faster(hurried_trace):
    """Of ways with the same batches, by what messages of the training have cost."""
    large = hurried_trace.rescaled(parameter_scale=1000)
    driven = scripted(large, lambda now: 1.0 if is_baseline(now) else 0.7, **APART)
    found = driven.session.findings
    *_, said = explanation(found, workers=4).split("\n")
    (best, *_) = faster_with_same_batch(
        found.trace, found.network, workers=4, than_s=found.predicted.iteration_s
    )
    assert said.startswith(f"Among other ways, predicted: {best.name} {best.step_s * 1e3:.1f} ms (")
    assert said.endswith(f"; {best.name} by {best.code}.")
    assert "precision=" in said


def test_a_step_of_several_passes_is_predicted_as_a_whole(hurried_trace):
    """The passes before the last one take what computing takes, whatever the plan."""
    large = hurried_trace.rescaled(parameter_scale=1000)
    driven = Owner(Session(PlanningTask(workers=4, **APART)), large, None)
    driven.draw = lambda strategy: (
        (1.0 if is_baseline(driven) else 0.7) if strategy is times_s else Recorded(large, 3)
    )
    driven.run()
    found = driven.session.findings
    lines = explanation(found, workers=4).split("\n")
    assert "ms in each of 3 passes; 4 workers." in lines[0]
    tried = [line for line in lines if line.startswith("Tried: ")]
    for line, trial in zip(tried, found.trials, strict=True):
        whole_ms = 1e3 * (trial.candidate.predicted_s + 2 * large.compute_s)
        assert f": predicted {whole_ms:.1f} ms a step of 3 passes, a step took " in line
    whole_s = found.predicted.iteration_s + 2 * large.compute_s
    (best, *_) = faster_with_same_batch(
        found.trace, found.network, workers=4, than_s=whole_s, passes=3
    )
    assert f"{best.name} {best.step_s * 1e3:.1f} ms ({best.gain:.2f}x" in lines[-1]


def test_nothing_is_said_of_other_ways_where_none_is_faster(hurried_trace):
    two_bytes = hurried_trace.rescaled(parameter_scale=1000).with_bytes_per_element(2)
    driven = scripted(two_bytes, lambda now: 1.0 if is_baseline(now) else 0.7, **APART)
    assert "other ways" not in explanation(driven.session.findings, workers=4)


def test_random_courses_come_to_contests():
    """Otherwise the laws above would say nothing of them."""

    def tries_several(data):
        driven = owner(data, PlanningTask(workers=4, **APART))
        driven.run()
        found = driven.session.findings
        return len(found.trials) > 1 and found.plan.planner != "ddp"

    find(
        st.data(), tries_several, settings=settings(phases=[Phase.generate], max_examples=500)
    )  # any one will do


def test_where_nothing_can_be_gained_nothing_is_tried(small_trace):
    quick = small_trace.with_bytes_per_element(1)
    found = scripted(quick, lambda _: 100.0).session.findings
    assert len(found.trials) == 1
    assert found.plan.planner == "ddp"
    assert "beside backward" in found.note or "would gain" in found.note
    assert f"Torch's own buckets stay: {found.note}." in explanation(found, workers=4)
    assert found.regret_steps is not None


def test_steps_that_are_over_are_no_reason_to_try(small_trace):
    """Where planning took long before anything could be tried, that is what is said."""
    driven = Owner(Session(PlanningTask(workers=4, baseline_caps_bytes=(1, 1))), small_trace, None)
    driven.draw = lambda strategy: 1.0 if strategy is times_s else Recorded(small_trace)
    driven.steps = -driven.session.task.most_steps
    command = driven.session.begin()
    while not isinstance(command, FindCandidates):
        command = driven.session.reply(driven.told(command))
    driven.steps = driven.session.task.most_steps
    while command is not None:
        command = driven.session.reply(driven.told(command))
    found = driven.session.findings
    assert len(found.trials) == 1
    assert found.note == "the steps that planning may take were over before anything could be tried"


def test_plans_are_tried_after_a_long_warm_up(small_trace):
    """Its steps are the user's, not planning's."""
    task = PlanningTask(
        workers=4,
        planner="single",
        baseline_caps_bytes=(1, 1),
        compression_at=lambda step: density_at(step // 1000),
    )
    trace = small_trace.with_bytes_per_element(4)
    driven = Owner(Session(task), trace, None)
    driven.draw = lambda strategy: 1.0 if strategy is times_s else Recorded(trace)
    take_steps = driven.carry_out

    def counting(command):
        if isinstance(command, TakeSteps):
            driven.steps += command.steps
        return take_steps(command)

    driven.carry_out = counting
    driven.run()
    assert driven.taken >= 5000
    assert len(driven.session.findings.trials) > 1

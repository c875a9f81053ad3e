"""Which plan stays: who challenges whom, when it is clear, and what is said of it."""

from itertools import pairwise

import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from on_paper import (
    MOST_TIMED,
    STARTUP_S,
    Owner,
    density_at,
    equal_tensors,
    owner,
    scripted,
    times_s,
)

from gradweave._src.advice import faster_with_same_batch
from gradweave._src.session.commands import (
    FindCandidates,
    Install,
    Probe,
    Recorded,
    TakeSteps,
    TimeSteps,
)
from gradweave._src.session.contest import STEPS_TO_PAY
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Stage
from gradweave._src.session.prices import MOST_PROBED_S, PROBED_SHARE
from gradweave._src.session.session import Session
from gradweave._src.session.task import PlanningTask
from gradweave._src.session.trials import CLEARLY_WORSE, HOPELESS_AFTER_STEPS

APART = {"baseline_caps_bytes": (1, 1)}  # a bucket for each tensor


@pytest.fixture
def hurried_trace(small_trace):
    """Whose messages nothing hides, so that fewer of them are a gain."""
    return small_trace.rescaled(backward_s=0.01)


SIX_DEAR = equal_tensors(6, 400_000)  # many plans of which are expected to gain


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


def test_a_gain_that_is_clear_without_the_hook_alone_is_not_clear(hurried_trace):
    """The baseline has run with it only."""

    def step_s(now):
        hook_s = 0.1 if now.notes_messages else 0.0
        return hook_s + (0.9 if is_baseline(now) else 0.8)

    driven = scripted(hurried_trace, step_s, **APART)
    found = driven.session.findings
    assert visits(driven) == [[True, False], [True, False, False]]
    assert found.gain == pytest.approx(0.9 / 0.8)


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
    said = "turn by turn, nothing that was tried is clearly faster than torch's own buckets"
    assert found.note == said
    assert found.step_s == found.baseline_step_s == 0.88


@pytest.mark.parametrize(("confirmed_s", "stays"), [(0.90, True), (0.97, False)])
def test_without_time_to_run_in_turn_only_a_clear_gain_is_kept(hurried_trace, confirmed_s, stays):
    """The steps that planning may take are over when the chosen plan runs without its hook."""

    def step_s(now):
        if is_baseline(now):
            return 1.0
        if now.notes_messages:
            return 0.9
        now.steps = now.session.task.most_steps
        return confirmed_s

    driven = scripted(hurried_trace, step_s, **APART)
    found = driven.session.findings
    assert visits(driven) == [[True], [True, False]]
    assert (found.plan.planner != "ddp") == stays
    assert found.step_s == (confirmed_s if stays else 1.0)


def test_who_wins_in_turn_and_is_slower_in_all_does_not_stay(hurried_trace):
    """The chosen plan had a bad visit when it was confirmed, and what is promised was measured."""

    def step_s(now):
        if is_baseline(now):
            return 1.0
        if now.notes_messages:
            return 0.9
        is_confirming = len(now.visits_s[now.sent]) == 1
        return 1.2 if is_confirming else 0.9

    driven = scripted(hurried_trace, step_s, **APART)
    found = driven.session.findings
    assert visits(driven) == [[True, False], [True, False, False]]
    assert found.plan.planner == "ddp"
    assert found.step_s == found.baseline_step_s == 1.0


def test_visits_of_another_time_decide_nothing(hurried_trace):
    """While messages were noted it gained 10 %; without that 4 %, which one visit does not show."""

    def step_s(now):
        if is_baseline(now):
            return 1.0
        return 0.9 if now.notes_messages else 0.96

    driven = scripted(hurried_trace, step_s, **APART)
    assert visits(driven) == [[True, False, False], [True, False, False, False]]
    assert driven.session.findings.step_s == pytest.approx(0.96)


def test_what_is_hopeless_is_cut_short():
    driven = scripted(SIX_DEAR, lambda now: 3.0 if is_baseline(now) else 4.5, **APART)
    _, *tried = driven.session.findings.trials
    assert [[len(visit.steps_s) for visit in trial.visits] for trial in tried] == [
        [HOPELESS_AFTER_STEPS]
    ] * 3
    timed = [command for command in driven.commands if isinstance(command, TimeSteps)]
    assert [command.hopeless_s for command in timed] == [None, *[(1 + CLEARLY_WORSE) * 3.0] * 3]


def test_three_may_challenge_and_each_teaches_what_messages_cost():
    """At first all messages are alike, so start-ups are guessed; then others have been seen."""
    driven = scripted(SIX_DEAR, lambda now: 3.0 if is_baseline(now) else 4.5, **APART)
    lengths = [trial.candidate.plan.lengths for trial in driven.session.findings.trials]
    assert lengths == [(1,) * 6, (1, 5), (3, 3), (6,)]
    asked = [command for command in driven.commands if isinstance(command, FindCandidates)]

    def costs_s(command, nbytes):
        return command.network.seconds("all-reduce", "native", nbytes=nbytes, workers=4)

    assert [costs_s(one, 1000) for one in asked] == pytest.approx([0.3, 0.2, 0.2])
    assert [costs_s(one, 2_000_000) for one in asked] == pytest.approx([1.8, 2.2, 2.2])


@pytest.mark.parametrize("winner", [1, 2, 3])
def test_the_fastest_of_several_challengers_stays(winner):
    """In whatever turn it comes."""

    def step_s(now):
        if is_baseline(now):
            return 3.0
        tried = list(dict.fromkeys([*now.visits_s, now.sent]))
        return 2.0 if tried.index(now.sent) == winner else 3.6

    driven = scripted(SIX_DEAR, step_s, **APART)
    found = driven.session.findings
    assert found.plan == found.trials[winner].candidate.plan
    assert (found.step_s, found.baseline_step_s) == (2.0, 3.0)


@pytest.mark.parametrize(("way", "pays"), [("ring+int8", True), ("ring+bf16", False)])
def test_what_8_bits_have_left_is_paid_before_a_plan_settles(way, pays):
    """Rounding to 16 bits leaves nothing."""
    large = equal_tensors(6, 4_000_000)
    driven = scripted(
        large, lambda now: 30.0 if is_baseline(now) else 40.0, roundings=(way,), **APART
    )
    tried = driven.session.findings.trials[1].candidate.plan
    assert str(tried.buckets[0].compression) == way.removeprefix("ring+")
    assert driven.session.findings.plan.planner == "ddp"
    *_, before_last, last = driven.commands
    assert isinstance(last, Install)
    assert (before_last == TakeSteps(STEPS_TO_PAY)) == pays
    assert (TakeSteps(STEPS_TO_PAY) in driven.commands) == pays


def long_since_begun(driven):
    """So that messages beside the training may take their most seconds."""
    driven.elapsed_s = 1e6


def probed_ways(driven):
    probes = [command for command in driven.commands if isinstance(command, Probe)]
    return [way.collective for probe in probes for way in probe.ways]


@pytest.mark.parametrize(("startup_s", "is_dear"), [(0.02, False), (0.2, True)])
def test_rivals_are_looked_at_only_where_starting_up_is_dear(startup_s, is_dear):
    """Which is 5 % of backward, here of 0.6 seconds."""

    def change(driven):
        long_since_begun(driven)
        driven.startup_s, driven.probing_share = startup_s, 0.25

    driven = scripted(SIX_DEAR, lambda _: 3.0, change=change, rivals=("ring", "blueconnect:auto"))
    rivals = ["ring", "blueconnect:auto"] if is_dear else []
    assert probed_ways(driven) == ["native", *rivals]
    network = driven.session.findings.network
    costs = {entry.collective for entry in network.costs}
    assert costs == {"native", *rivals}


@pytest.mark.parametrize("elapsed_s", [60.0, 1e6])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_messages_beside_training_take_few_seconds_in_all(elapsed_s, share):
    """Those of all collectives together."""

    def change(driven):
        driven.elapsed_s, driven.probing_share = elapsed_s, share

    driven = scripted(SIX_DEAR, lambda _: 3.0, change=change, rivals=("ring", "blueconnect:auto"))
    assert driven.probed_s <= min(MOST_PROBED_S, PROBED_SHARE * driven.elapsed_s)
    probes = [command for command in driven.commands if isinstance(command, Probe)]
    assert probes
    for before, after in pairwise(probes):
        assert after.within_s == pytest.approx((1 - share) * before.within_s)
        assert after.within_bytes < before.within_bytes


def test_planning_again_begins_with_no_samples_and_all_bytes():
    """Messages have become twice as dear to start meanwhile: the old ones tell nothing."""
    settled = []

    def step_s(now):
        if now.session.findings.stage is not Stage.SETTLED:
            return 3.0
        if not settled:
            settled.append(now.session.findings)
            now.startup_s *= 2
        return 30.0

    def change(driven):
        long_since_begun(driven)
        driven.probing_share = 0.25

    driven = scripted(SIX_DEAR, step_s, change=change, replan_when=0.5, watches_briefly=True)
    first, second = settled[0].network, driven.session.findings.network

    def startup_s(network):
        return network.seconds("all-reduce", "native", nbytes=1, workers=4)

    assert startup_s(second) - startup_s(first) == pytest.approx(STARTUP_S)
    probes = [command for command in driven.commands if isinstance(command, Probe)]
    assert len(probes) == 2
    assert probes[0].within_bytes == probes[1].within_bytes
    assert probes[1].within_s == pytest.approx(0.75 * probes[0].within_s)


def test_a_machine_that_slows_down_makes_nobody_hopeless(hurried_trace):
    """The challenger is 3.5 % faster in each turn, and both take 25 % longer in the second."""
    turns = {True: 0, False: 0}

    def step_s(now):
        mine = is_baseline(now)
        turns[mine] += 1
        return (1.0 if turns[mine] <= MOST_TIMED else 1.25) * (1.0 if mine else 0.965)

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
    begin = f"Not tried, but predicted to be faster: {best.name} {best.step_s * 1e3:.1f} ms ("
    assert said.startswith(begin)
    assert said.endswith(f" For {best.name} write {best.code}.")
    assert "precision=" in said


@pytest.mark.parametrize("formats", [("bf16",), ("bf16", "int8")])
def test_what_plans_may_do_already_is_not_advised(hurried_trace, formats):
    large = hurried_trace.rescaled(parameter_scale=1000)
    ways = tuple(f"ring+{name}" for name in formats)
    driven = scripted(large, lambda now: 1.0 if is_baseline(now) else 0.7, roundings=ways, **APART)
    found = driven.session.findings
    assert found.may_round_to == formats
    named = faster_with_same_batch(
        found.trace, found.network, workers=4, than_s=1e9, roundings=formats
    )
    rounded = {one.changes for one in named if "rounded" in one.changes}
    assert rounded == (set() if "int8" in formats else {"each hop is rounded to int8"})
    assert 'precision="bf16"' not in explanation(found, workers=4)


def test_what_is_compared_stands_before_what_each_turn_took(hurried_trace):
    def step_s(now):
        return 1.0 if is_baseline(now) else 0.8 if now.notes_messages else 0.7

    said = explanation(scripted(hurried_trace, step_s, **APART).session.findings, workers=4)
    assert ", a step took 1000.0 ms while messages were noted.\n" in said
    assert (
        ", a step took 700.0 ms (700.0 in 1 turn; 800.0 while messages were noted) (chosen).\n"
        in said
    )
    assert "A step is 1.25x as fast as " in said


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
    assert "Not tried" not in explanation(driven.session.findings, workers=4)


def test_random_courses_come_to_contests():
    """Otherwise the laws above would say nothing of them."""

    def tries_several(data):
        driven = owner(data, PlanningTask(workers=4, **APART))
        driven.run()
        found = driven.session.findings
        return len(found.trials) > 1 and found.plan.planner != "ddp"

    find(
        st.data(), tries_several, settings=settings(phases=[Phase.generate], max_examples=5000)
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

"""The laws of a planning session, for any step times, failures and stops; no process, no torch."""

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from on_paper import TASKS, Owner, density_at, owner, times_s

from gradweave import Link, Network, Recipe
from gradweave._src.costs import flat
from gradweave._src.plan import Plan
from gradweave._src.session.candidates import shortlist
from gradweave._src.session.commands import (
    Failed,
    Install,
    Record,
    Recorded,
    SimpleBuckets,
    StepsTimed,
    TimeSteps,
    Told,
)
from gradweave._src.session.contest import MOST_CHALLENGERS
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Stage
from gradweave._src.session.prices import PROBED_STEPS
from gradweave._src.session.session import Session
from gradweave._src.session.task import PlanningTask
from gradweave._src.travel import Travel

NETWORK = Network(name="n", source="n", links=flat(Link(latency_s=1e-4, s_per_byte=1e-8)))
MOST_COMMANDS = 60
# From which stage which may follow; each may also end in the last one.
FOLLOWING = {
    Stage.NOT_BEGUN: {Stage.RECORDING},
    Stage.RECORDING: {Stage.LEARNING},
    Stage.LEARNING: {Stage.WARMING_UP, Stage.TRYING},
    Stage.WARMING_UP: {Stage.TRYING},
    Stage.TRYING: set(),
    Stage.SETTLED: {Stage.RECORDING},  # planning again
}


@given(data=st.data(), stop_after=st.integers(1, 60))
def test_it_ends_in_a_legal_stage_and_leaves_a_runnable_plan(data, stop_after):
    """Whenever it is stopped."""
    driven = owner(data)
    driven.run(stop_after=stop_after)
    found = driven.session.findings
    assert driven.session.is_over
    assert found.stage is Stage.SETTLED
    stages = [Stage.NOT_BEGUN, *driven.stages]
    for before, after in pairwise(stages):
        assert after in {before, Stage.SETTLED, *FOLLOWING[before]}
    if found.plan is None:
        assert driven.installed is SimpleBuckets.ORIGINAL
        assert found.note is not None
    else:
        assert driven.installed == found.plan
        found.plan.check_describes(driven.trace)
    assert explanation(found, workers=4)


@given(data=st.data())
def test_it_keeps_nothing_that_was_slower_than_the_baseline(data):
    driven = owner(data, PlanningTask(workers=4, trial_steps=3, baseline_caps_bytes=(1, 10**9)))
    driven.run()
    found = driven.session.findings
    if not found.trials:
        return
    (baseline,) = (trial for trial in found.trials if trial.candidate.is_baseline)
    (chosen,) = (trial for trial in found.trials if trial.candidate.plan == found.plan)
    assert chosen.step_s <= baseline.step_s
    for trial in found.trials:
        lengths = tuple(trial.candidate.plan.lengths)
        assert [visit.steps_s for visit in trial.visits] == driven.visits_s[lengths]


@given(data=st.data(), trial_steps=st.integers(1, 20))
def test_planning_is_short_and_nothing_is_noted_after_it(data, trial_steps):
    task = PlanningTask(workers=4, baseline_caps_bytes=(1, 10**9), trial_steps=trial_steps)
    driven = owner(data, task)
    driven.run()
    assert not driven.notes_messages
    assert driven.steps <= driven.session.task.most_steps
    assert len(driven.session.findings.trials) <= 1 + MOST_CHALLENGERS


@given(data=st.data(), trial_steps=st.integers(1, 5))
def test_planning_again_takes_no_longer_than_planning(data, trial_steps):
    """Whatever has become of the network meanwhile."""
    task = PlanningTask(
        workers=4, baseline_caps_bytes=(1, 10**9), trial_steps=trial_steps, replan_when=0.02
    )
    driven = owner(data, task)
    driven.run(stop_after=2 * MOST_COMMANDS)
    seen = list(zip(driven.stages, driven.steps_at, strict=False))
    began = 0
    for (before, _), (after, steps) in pairwise([(Stage.SETTLED, 0), *seen]):
        if before is Stage.SETTLED and after is not Stage.SETTLED:
            began = steps
        if before is not Stage.SETTLED and after is Stage.SETTLED:
            assert steps - began <= task.most_steps


@given(data=st.data(), rivals=st.sampled_from([(), ("ring",), ("ring", "blueconnect:auto")]))
def test_messages_beside_training_have_the_bytes_of_a_few_steps(data, rivals):
    """However small the model, and whatever it is compared with; each time that it is planned."""
    task = replace(data.draw(TASKS), replan_when=None)
    if task.compression_at is None:
        task = replace(task, rivals=rivals)
    driven = owner(data, task)
    driven.elapsed_s = data.draw(st.sampled_from([0.0, 1e3]))
    driven.run()
    model_bytes = sum(tensor.nbytes for tensor in driven.trace.tensors)
    assert driven.probed_bytes <= PROBED_STEPS * model_bytes


@given(data=st.data())
def test_sessions_that_are_told_the_same_ask_for_the_same(data):
    first = owner(data)
    told = []

    def remembered(strategy):
        told.append(data.draw(strategy))
        return told[-1]

    first.draw = remembered
    first.run(stop_after=MOST_COMMANDS)
    answers = iter(told)
    second = Owner(Session(first.session.task), first.trace, lambda _: next(answers))
    second.run(stop_after=MOST_COMMANDS)
    assert second.commands == first.commands
    assert second.session.findings == first.session.findings


@given(data=st.data(), fails_at=st.integers(1, 30))
def test_a_failure_ends_planning_and_not_training(data, fails_at):
    driven = owner(data)
    command = driven.session.begin()
    for number in count(1):
        if command is None:
            break
        if number >= fails_at and not isinstance(command, Install):
            command = driven.session.reply(Failed("a rank has failed"))
            assert driven.session.is_over
            if command is not None:
                assert command.buckets is SimpleBuckets.ORIGINAL
                driven.installed = command.buckets
            break
        command = driven.session.reply(driven.told(command))
    if driven.session.findings.plan is not None:
        assert driven.installed == driven.session.findings.plan
    else:
        assert driven.installed is SimpleBuckets.ORIGINAL


def test_what_was_planned_for_a_warm_up_is_not_kept_when_planning_fails(small_trace, caplog):
    """It is for a density that will not come again."""
    driven = Owner(Session(PlanningTask(workers=4, compression_at=density_at)), small_trace, None)
    driven.draw = lambda strategy: 1.0 if strategy is times_s else Recorded(small_trace)
    command = driven.session.begin()
    while driven.session.findings.stage is not Stage.WARMING_UP or isinstance(command, Install):
        command = driven.session.reply(driven.told(command))
    assert isinstance(driven.installed, Plan)
    command = driven.session.reply(Failed("a rank has failed"))
    assert command.buckets is SimpleBuckets.ORIGINAL
    assert (driven.session.findings.plan, driven.session.findings.stage) == (None, Stage.SETTLED)
    assert "a rank has failed" in caplog.messages[-1]


def test_what_was_not_begun_installs_nothing(caplog):
    session = Session(PlanningTask(workers=2))
    assert session.stop("there is a communication hook") is None
    assert session.findings.note == "there is a communication hook"
    assert caplog.messages == ["keeping torch's own buckets: there is a communication hook"]


def made_plan(trace):
    return shortlist(
        trace,
        NETWORK,
        workers=4,
        planner="single",
        travels=(Travel("ring"),),
        baseline_lengths=[1] * len(trace.tensors),
    )[0].plan


def test_a_given_plan_is_settled_at_once(small_trace):
    plan = made_plan(small_trace)
    session = Session(PlanningTask(workers=4), given=plan)
    assert session.findings.stage is Stage.SETTLED
    assert (session.findings.plan, session.findings.is_given) == (plan, True)
    assert session.begin() is None
    assert session.is_over


@pytest.mark.parametrize(("step_s", "replans"), [(1.4, False), (1.6, True), (0.4, True)])
def test_it_plans_again_when_steps_take_another_time(small_trace, step_s, replans):
    recipe = Recipe(
        workers=4,
        device="cpu",
        plan=made_plan(small_trace),
        trace=small_trace,
        network=NETWORK,
        step_s=1.0,
    )
    session = Session(PlanningTask(workers=4, replan_when=0.5), given=recipe)
    assert isinstance(session.begin(), TimeSteps)
    assert isinstance(session.reply(StepsTimed((1.2,))), TimeSteps)
    command = session.reply(StepsTimed((step_s,)))
    assert isinstance(command, Record if replans else TimeSteps)
    assert (session.findings.stage is Stage.RECORDING) == replans


def test_a_session_that_is_abandoned_installs_nothing():
    session = Session(PlanningTask(workers=2))
    session.begin()
    session.abandon("other ranks cannot be reached")
    assert session.is_over
    assert session.reply(None) is None
    assert session.findings.stage is Stage.SETTLED


def test_plans_are_installed_that_fit_the_trace(small_trace):
    driven = Owner(Session(PlanningTask(workers=4, trial_steps=1)), small_trace, lambda _: 1.0)
    driven.draw = lambda strategy: Recorded(small_trace) if strategy is not times_s else 1.0
    driven.run()
    installed = [c.buckets for c in driven.commands if isinstance(c, Install)]
    assert installed[0] is SimpleBuckets.ORIGINAL
    for plan in installed[1:]:
        assert isinstance(plan, Plan)
        plan.check_describes(small_trace)


def test_while_it_plans_it_says_what_it_waits_for(small_trace):
    session = Session(PlanningTask(workers=4))
    session.begin()
    said = explanation(session.findings, workers=4)
    assert said == (
        "No plan yet: recording, step 0 of at most 100; waits for 5 steps in which it is noted "
        "when gradients are ready."
    )
    session.reply(Told(reply=Recorded(small_trace), steps=9, elapsed_s=1.0))
    said = explanation(session.findings, workers=4)
    assert "learning, step 9 of at most 100" in said
    assert "Measured:" in said


def test_one_session_of_all_speaks(caplog, small_trace):
    caplog.set_level("INFO")
    for speaks in (True, False):
        caplog.clear()
        driven = Owner(Session(PlanningTask(workers=4), speaks=speaks), small_trace, None)
        driven.draw = lambda strategy: 1.0 if strategy is times_s else Recorded(small_trace)
        driven.run()
        begun, *ended = caplog.messages if speaks else ("planning begins", "planning ended: ")
        assert begun.startswith("planning begins")
        assert len(ended) == 1
        assert ended[0].startswith("planning ended: ")
        assert speaks or not caplog.messages

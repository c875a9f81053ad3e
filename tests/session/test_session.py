"""The laws of a planning session, for any step times, failures and stops; no process, no torch."""

from itertools import count, pairwise

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from on_paper import TASKS, Owner, density_at, owner, times_s

from gradweave import Link, Network, Recipe
from gradweave._src.costs import flat
from gradweave._src.plan import Plan
from gradweave._src.session.candidates import shortlist
from gradweave._src.session.commands import (
    Candidates,
    Failed,
    FindCandidates,
    Install,
    Record,
    Recorded,
    SimpleBuckets,
    StepsTimed,
    TimeSteps,
    Told,
    Unplannable,
)
from gradweave._src.session.contest import MOST_CHALLENGERS
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Stage
from gradweave._src.session.prices import MOST_PROBED_S, PROBED_SHARE, PROBED_STEPS
from gradweave._src.session.session import WINDOWS_WATCHED_BRIEFLY, Session
from gradweave._src.session.task import SETTLING_STEPS, PlanningTask
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
    """That random courses come to other plans is a test of test_contest.py."""
    driven = owner(data, PlanningTask(workers=4, baseline_caps_bytes=(1, 1)))
    driven.run()
    found = driven.session.findings
    assert bool(found.trials) == (found.plan is not None)  # what was unplannable was not tried
    if found.plan is None:
        return
    (baseline,) = (trial for trial in found.trials if trial.candidate.is_baseline)
    (chosen,) = (trial for trial in found.trials if trial.candidate.plan == found.plan)
    assert chosen.step_s <= baseline.step_s
    for trial in found.trials:
        lengths = tuple(trial.candidate.plan.lengths)
        assert [visit.steps_s for visit in trial.visits] == driven.visits_s[lengths]


def is_drawn(course):
    """Fail unless random courses come to one of which this is true."""
    find(st.data(), course, settings=settings(phases=[Phase.generate], max_examples=5000))


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
    assert all(steps <= task.most_steps for steps in planned_in(driven))


def planned_in(driven):
    """How many steps each planning took that came to its end."""
    seen = list(zip(driven.stages, driven.steps_at, strict=False))
    found, began = [], 0
    for (before, _), (after, steps) in pairwise([(Stage.SETTLED, 0), *seen]):
        if before is Stage.SETTLED and after is not Stage.SETTLED:
            began = steps
        if before is not Stage.SETTLED and after is Stage.SETTLED:
            found.append(steps - began)
    return found


def test_random_courses_plan_again():
    """Otherwise the law above would say nothing of that."""
    task = PlanningTask(workers=4, baseline_caps_bytes=(1, 10**9), replan_when=0.02)

    def plans_twice(data):
        driven = owner(data, task)
        driven.run(stop_after=2 * MOST_COMMANDS)
        return len(planned_in(driven)) > 1

    is_drawn(plans_twice)


@given(data=st.data(), rivals=st.sampled_from([(), ("ring",), ("ring", "blueconnect:auto")]))
def test_messages_beside_training_have_the_bytes_of_a_few_steps(data, rivals):
    """However small the model, and whatever it is compared with; each time that it is planned."""
    task = replace(data.draw(TASKS), replan_when=None)
    if task.compression_at is None:
        task = replace(task, rivals=rivals)
    driven = owner(data, task)
    driven.elapsed_s = data.draw(st.sampled_from([0.0, 1e3]))
    driven.probing_share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    driven.run()
    assert driven.probed_s <= min(MOST_PROBED_S, PROBED_SHARE * driven.elapsed_s)
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


def recipe_for(trace):
    return Recipe(
        workers=4,
        device="cpu",
        plan=made_plan(trace),
        trace=trace,
        network=NETWORK,
        step_s=1.0,
    )


@pytest.mark.parametrize(("step_s", "replans"), [(1.4, False), (1.6, True), (0.4, True)])
def test_it_plans_again_when_steps_take_another_time(small_trace, step_s, replans):
    recipe = recipe_for(small_trace)
    session = Session(PlanningTask(workers=4, replan_when=0.5), given=recipe)
    assert isinstance(session.begin(), TimeSteps)
    assert isinstance(session.reply(StepsTimed((1.2,))), TimeSteps)
    command = session.reply(StepsTimed((step_s,)))
    assert isinstance(command, Record if replans else TimeSteps)
    assert (session.findings.stage is Stage.RECORDING) == replans


def test_only_the_first_window_lets_steps_settle(small_trace):
    """Nothing has changed since the window before."""
    task = PlanningTask(workers=4, replan_when=0.5)
    session = Session(task, given=recipe_for(small_trace))
    command, settling = session.begin(), []
    for _ in range(3):
        settling.append(command.settling_steps)
        command = session.reply(StepsTimed((1.0,)))
    assert settling == [SETTLING_STEPS, 0, 0]


def test_of_a_remembered_plan_faster_steps_are_what_is_expected_from_then_on(small_trace):
    """That was another run; a given plan's would be a reason to plan again."""
    task = PlanningTask(workers=4, replan_when=0.5)
    session = Session(task, given=recipe_for(small_trace), is_remembered=True)
    session.begin()
    assert isinstance(session.reply(StepsTimed((0.25,))), TimeSteps)
    assert session.findings.step_s == 0.25
    assert isinstance(session.reply(StepsTimed((0.375,))), TimeSteps)
    assert session.findings.step_s == 0.25
    assert isinstance(session.reply(StepsTimed((0.5,))), Record)  # and less than at first


def test_who_watches_briefly_plans_again_once(small_trace):
    task = PlanningTask(workers=4, replan_when=0.5, watches_briefly=True)
    session = Session(task, given=recipe_for(small_trace), is_remembered=True)
    driven = Owner(session, small_trace, None)
    driven.draw = lambda strategy: 2.0 if strategy is times_s else Recorded(small_trace)
    driven.run()
    watched = [
        command
        for command, stage in zip(driven.commands, driven.stages, strict=False)
        if isinstance(command, TimeSteps) and stage is Stage.SETTLED
    ]
    assert len(watched) == 1
    assert sum(isinstance(command, Record) for command in driven.commands) == 1
    assert isinstance(driven.commands[-1], Install)
    assert session.is_over


def test_who_watches_briefly_soon_stops(small_trace):
    task = PlanningTask(workers=4, replan_when=0.5, watches_briefly=True)
    session = Session(task, given=recipe_for(small_trace), is_remembered=True)
    driven = Owner(session, small_trace, lambda _: 1.0)
    driven.run()
    assert [type(command) for command in driven.commands] == [TimeSteps] * WINDOWS_WATCHED_BRIEFLY
    assert session.is_over


def test_what_cannot_be_planned_for_is_sent_in_the_order_in_which_it_came():
    """No trace has it."""
    session = Session(PlanningTask(workers=4))
    session.begin()
    command = session.reply(Unplannable("gradients come in another order", ("b", "a")))
    assert command == Install(SimpleBuckets.ORIGINAL, order=("b", "a"))
    assert session.reply(None) is None
    assert session.is_over
    assert session.findings.note == "gradients come in another order"


def test_a_mistake_of_plannings_own_ends_planning_and_not_training(small_trace, caplog):
    session = Session(PlanningTask(workers=4))
    driven = Owner(session, small_trace, None)
    driven.draw = lambda strategy: 1.0 if strategy is times_s else Recorded(small_trace)
    command = session.begin()
    while not isinstance(command, FindCandidates):
        command = session.reply(driven.told(command))
    command = session.reply(Candidates(()))  # there is always one
    order = tuple(tensor.name for tensor in small_trace.tensors)
    assert command == Install(SimpleBuckets.ORIGINAL, order=order)
    assert session.is_over
    assert (session.findings.stage, session.findings.plan) == (Stage.SETTLED, None)
    assert session.findings.note.startswith("planning failed: ")
    assert caplog.messages[-1].startswith("keeping torch's own buckets: planning failed: ")


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

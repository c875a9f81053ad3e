"""The laws of a planning session, for any step times, failures and stops; no process, no torch."""

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import traces

from gradweave import Link, Network, Recipe
from gradweave.compression import Compression
from gradweave.costs import Line, flat
from gradweave.plan import Plan
from gradweave.session.candidates import shortlist, unplanned_lengths
from gradweave.session.commands import (
    Candidates,
    CompressionPrice,
    Failed,
    FindCandidates,
    Install,
    Measured,
    PriceCompression,
    Record,
    SimpleBuckets,
    SlowestRank,
    StepsTaken,
    TakeSteps,
    TimeSteps,
    Unplannable,
)
from gradweave.session.explain import explanation
from gradweave.session.findings import Stage
from gradweave.session.session import PlanningTask, Session

NETWORK = Network(name="n", source="n", links=flat(Link(latency_s=1e-4, s_per_byte=1e-8)))
MOST_COMMANDS = 60
# From which stage which may follow; each may also end in the last one.
FOLLOWING = {
    Stage.NOT_BEGUN: {Stage.RECORDING},
    Stage.RECORDING: {Stage.WARMING_UP, Stage.TRYING},
    Stage.WARMING_UP: {Stage.TRYING},
    Stage.TRYING: set(),
    Stage.SETTLED: {Stage.RECORDING},  # planning again
}

times_s = st.floats(0.9, 1.1)


def density_at(step):
    return Compression(method="gtopk", density=0.5 if step < 5 else 0.1)


TASKS = st.builds(
    PlanningTask,
    workers=st.just(4),
    trial_steps=st.sampled_from([0, 3]),
    replan_when=st.sampled_from([None, 0.05]),
    compression_at=st.sampled_from([None, density_at]),
    keeps_declared_order=st.booleans(),
)


class Owner:
    """Carries out commands on paper, and remembers what is installed."""

    def __init__(self, session, trace, draw):
        self.session, self.trace, self.draw = session, trace, draw
        self.installed, self.commands, self.stages = SimpleBuckets.ORIGINAL, [], []
        self.taken = 0
        self.slowest_s = {}  # by plan, what its trials took

    def run(self, *, stop_after=None):
        command = self.session.begin()
        for number in count(1):
            self.stages.append(self.session.findings.stage)
            if command is None:
                return
            self.commands.append(command)
            if number == stop_after:
                command = self.session.stop("enough")
                if command is not None:
                    self.installed = command.buckets
                self.stages.append(self.session.findings.stage)
                return
            command = self.session.reply(self.carry_out(command))

    def carry_out(self, command):
        match command:
            case Install():
                self.installed = command.buckets
                return None
            case Record():
                order = tuple(tensor.name for tensor in self.trace.tensors)
                return self.draw(
                    st.sampled_from(
                        [Measured(self.trace, NETWORK)] * 9
                        + [Unplannable("no", order), Failed("broken")]
                    )
                )
            case FindCandidates():
                return Candidates(tuple(self.candidates(command)))
            case TimeSteps():
                taken_s = self.draw(times_s)
                self.slowest_s.setdefault(self.installed, []).append(taken_s)
                return SlowestRank(taken_s)
            case TakeSteps():
                self.taken += command.steps
                return StepsTaken(self.taken)
            case PriceCompression():
                return CompressionPrice(1e-9, Line(startup_s=1e-4, s_per_byte=1e-10))

    def candidates(self, command):
        return shortlist(
            command.trace,
            command.network,
            workers=4,
            planner="optimal",
            collectives=("ring",),
            baseline_lengths=unplanned_lengths(
                [tensor.nbytes for tensor in command.trace.tensors],
                caps_bytes=self.session.task.baseline_caps_bytes,
                is_declared=self.session.task.keeps_declared_order,
            ),
            compression=command.compression,
        )


def owner(data, task=None):
    task = data.draw(TASKS) if task is None else task
    trace = data.draw(traces(most=5)).with_bytes_per_element(4)
    return Owner(Session(task), trace, data.draw)


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
    driven = owner(data, PlanningTask(workers=4, trial_steps=3))
    driven.run()
    found = driven.session.findings
    if not found.trials:
        return
    (baseline,) = (trial for trial in found.trials if trial.candidate.is_baseline)
    (chosen,) = (trial for trial in found.trials if trial.candidate.plan == found.plan)
    assert chosen.step_s <= baseline.step_s
    for trial in found.trials:
        assert list(trial.rounds_s) == driven.slowest_s[trial.candidate.plan]


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
        command = driven.session.reply(driven.carry_out(command))
    if driven.session.findings.plan is not None:
        assert driven.installed == driven.session.findings.plan
    else:
        assert driven.installed is SimpleBuckets.ORIGINAL


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
        collectives=("ring",),
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
    assert isinstance(session.reply(SlowestRank(1.2)), TimeSteps)
    command = session.reply(SlowestRank(step_s))
    assert isinstance(command, Install if replans else TimeSteps)
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
    driven.draw = lambda strategy: (
        Measured(small_trace, NETWORK) if strategy is not times_s else 1.0
    )
    driven.run()
    installed = [c.buckets for c in driven.commands if isinstance(c, Install)]
    assert installed[0] is SimpleBuckets.ONE
    for plan in installed[1:]:
        assert isinstance(plan, Plan)
        plan.check_describes(small_trace)

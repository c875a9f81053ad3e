"""The laws of a planning session, for any step times, failures and stops; no process, no torch."""

from itertools import count, pairwise

import pytest
from hypothesis import find, given
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
    PriceCompression,
    Probe,
    Probed,
    Record,
    Recorded,
    SimpleBuckets,
    StepsTaken,
    StepsTimed,
    TakeSteps,
    TimeSteps,
    Told,
    Unplannable,
)
from gradweave.session.contest import MOST_CHALLENGERS
from gradweave.session.explain import explanation
from gradweave.session.findings import Stage
from gradweave.session.learning import MessageSample
from gradweave.session.session import Session
from gradweave.session.task import AGREEING_STEPS, PlanningTask

NETWORK = Network(name="n", source="n", links=flat(Link(latency_s=1e-4, s_per_byte=1e-8)))
MOST_COMMANDS = 60
# So dear that merging small tensors gains a good part of a step of a second.
STARTUP_S = 0.2
# From which stage which may follow; each may also end in the last one.
FOLLOWING = {
    Stage.NOT_BEGUN: {Stage.RECORDING},
    Stage.RECORDING: {Stage.LEARNING},
    Stage.LEARNING: {Stage.WARMING_UP, Stage.TRYING},
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
        self.taken = self.steps = 0
        self.elapsed_s = 0.0
        self.notes_messages = False
        self.visits_s = {}  # by plan, what the steps of its visits took

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
            command = self.session.reply(self.told(command))

    def told(self, command):
        """What came of it; whatever takes steps is told with their number."""
        reply = self.carry_out(command)
        if reply is None or isinstance(reply, StepsTaken):
            return reply
        self.steps += AGREEING_STEPS
        match command:
            case Record():
                self.steps += 2 + command.steps
            case TimeSteps():
                self.steps += command.settling_steps + command.steps
            case Probe():
                self.steps += 3 * len(command.sizes_bytes)
        return Told(reply=reply, steps=self.steps, elapsed_s=self.elapsed_s)

    def carry_out(self, command):  # noqa: PLR0911
        match command:
            case Install():
                self.installed, self.notes_messages = command.buckets, command.notes_messages
                return None
            case Record():
                order = tuple(tensor.name for tensor in self.trace.tensors)
                return self.draw(
                    st.sampled_from(
                        [Recorded(self.trace)] * 9 + [Unplannable("no", order), Failed("broken")]
                    )
                )
            case Probe():
                assert self.session.findings.stage is not Stage.SETTLED
                return Probed(tuple(sample(size) for size in command.sizes_bytes))
            case FindCandidates():
                return Candidates(tuple(self.candidates(command)))
            case TimeSteps():
                taken_s = tuple(self.draw(times_s) for _ in range(min(2, command.steps)))
                self.elapsed_s += sum(taken_s)
                if self.session.findings.stage is not Stage.SETTLED:
                    self.visits_s.setdefault(self.sent, []).append(taken_s)
                return StepsTimed(taken_s, self.samples())
            case TakeSteps():
                self.taken += command.steps
                return StepsTaken(self.taken)
            case PriceCompression():
                return CompressionPrice(1e-9, Line(startup_s=1e-4, s_per_byte=1e-10))

    @property
    def sent(self):
        """How many tensors each bucket has that is sent now."""
        if self.installed is SimpleBuckets.ORIGINAL:
            return tuple(self.baseline_lengths())
        return tuple(len(bucket.tensors) for bucket in self.installed.buckets)

    def samples(self):
        """Of messages on the network, one by one."""
        sizes = iter([tensor.nbytes for tensor in self.trace.tensors])
        return tuple(
            sample(sum(next(sizes) for _ in range(length)))
            for length in (self.sent if self.notes_messages else ())
        )

    def baseline_lengths(self):
        return unplanned_lengths(
            [tensor.nbytes for tensor in self.trace.tensors],
            caps_bytes=self.session.task.baseline_caps_bytes,
            is_declared=self.session.task.keeps_declared_order,
        )

    def candidates(self, command):
        return shortlist(
            command.trace,
            command.network,
            workers=4,
            planner=self.session.task.planner,
            collectives=command.network.collectives,
            baseline_lengths=self.baseline_lengths(),
            compression=command.compression,
        )


def sample(nbytes):
    return MessageSample(
        operation="all-reduce",
        collective="native",
        sizes_bytes=(nbytes,),
        taken_s=STARTUP_S + 1e-6 * nbytes,
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


def scripted(trace, step_s_of, **task):
    """A session on paper whose steps take what the function of its owner says."""
    driven = Owner(Session(PlanningTask(workers=4, **task)), trace, None)
    driven.draw = lambda strategy: step_s_of(driven) if strategy is times_s else Recorded(trace)
    driven.run()
    return driven


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


def test_random_courses_come_to_contests():
    """Otherwise the laws above would say nothing of them."""

    def tries_several(data):
        driven = owner(data, PlanningTask(workers=4, **APART))
        driven.run()
        found = driven.session.findings
        return len(found.trials) > 1 and found.plan.planner != "ddp"

    find(st.data(), tries_several)


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

"""Phases are the whole of a step, whatever passes it consists of."""

from itertools import count

import pytest
import torch
from ranks import on_processes
from small_training import batch, network, plan_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, ShardedDataParallel, watch
from gradweave._src.clocks import HostClock
from gradweave._src.phases import PHASES, Phases
from gradweave._src.plan import Bucket, Plan
from gradweave._src.results import StageBegin
from gradweave._src.runtime.reporting.step_clock import KEPT_STEPS, StepClock


class Scripted:
    """Seconds pass where a test says so."""

    def __init__(self):
        self.now_s = 0.0
        self.clock = StepClock(HostClock(lambda: self.now_s))

    def passes(self, seconds):
        self.now_s += seconds

    def pass_(self, *, input_s, forward_s, backward_s, network_s=0.0, is_synchronised=True):
        self.passes(input_s)
        self.clock.forward_begins(is_synchronised=is_synchronised)
        self.passes(forward_s)
        self.clock.forward_ends()
        self.passes(backward_s)
        if is_synchronised:
            self.clock.gradients_ready()
            self.passes(network_s)
            self.clock.messages_done()


STEP = {"input_s": 1.0, "forward_s": 2.0, "backward_s": 4.0, "network_s": 8.0}


def test_phases_of_steps_after_the_first():
    scripted = Scripted()
    for _ in range(3):
        scripted.pass_(**STEP)
    assert scripted.clock.phases() == [Phases(**STEP)] * 2
    assert list(scripted.clock.step_s) == [15.0, 15.0]


def test_passes_without_synchronisation_belong_to_the_step():
    scripted = Scripted()
    scripted.pass_(**STEP)
    scripted.pass_(input_s=1.0, forward_s=2.0, backward_s=4.0, is_synchronised=False)
    scripted.pass_(**STEP)
    (step,) = scripted.clock.phases()
    # What lies between two passes cannot be told from backward without synchronisation.
    assert step == Phases(input_s=1.0, forward_s=4.0, backward_s=9.0, network_s=8.0)
    assert step.step_s == pytest.approx(sum(scripted.clock.step_s))


def test_waiting_in_forward_is_networks():
    scripted = Scripted()
    scripted.pass_(**STEP)
    scripted.passes(1.0)
    scripted.clock.forward_begins(is_synchronised=True)
    scripted.clock.waits(lambda: scripted.passes(3.0))
    scripted.passes(2.0)
    scripted.clock.forward_ends()
    scripted.passes(4.0)
    scripted.clock.gradients_ready()
    scripted.clock.messages_done()
    (step,) = scripted.clock.phases()
    assert step == Phases(input_s=1.0, forward_s=2.0, backward_s=4.0, network_s=3.0)


def test_last_gradient_counts():
    scripted = Scripted()
    scripted.pass_(**STEP)
    scripted.clock.forward_begins(is_synchronised=True)
    scripted.clock.forward_ends()
    scripted.passes(1.0)
    scripted.clock.gradients_ready()
    scripted.passes(1.0)
    scripted.clock.gradients_ready()
    scripted.passes(1.0)
    scripted.clock.messages_done()
    (step,) = scripted.clock.phases()
    assert (step.backward_s, step.network_s) == (2.0, 1.0)


def test_a_pass_without_its_last_gradient_is_left_out():
    scripted = Scripted()
    scripted.pass_(**STEP)
    scripted.clock.forward_begins(is_synchronised=True)
    scripted.clock.forward_ends()
    scripted.pass_(**STEP)  # and so is the step with which it runs together
    assert scripted.clock.phases() == []
    scripted.pass_(**STEP)
    assert scripted.clock.phases() == [Phases(**STEP)]


def test_the_first_step_begins_with_its_forward_pass():
    scripted = Scripted()
    assert (scripted.clock.steps, scripted.clock.all_step_s()) == (0, [])
    scripted.pass_(**STEP)
    assert (scripted.clock.steps, scripted.clock.all_step_s()) == (1, [14.0])
    scripted.pass_(**STEP)
    assert (scripted.clock.steps, scripted.clock.all_step_s()) == (2, [14.0, 15.0])


def test_stages_begin_at_steps():
    scripted = Scripted()
    for stage in ("not begun", "not begun", "recording", "trying", "settled", "settled"):
        scripted.clock.stage_begins(stage)
        scripted.pass_(**STEP)
    scripted.clock.stage_begins("recording")
    scripted.clock.stage_begins("settled")  # and nobody has trained meanwhile
    stages = [("not begun", 0), ("recording", 2), ("trying", 3), ("settled", 4)]
    assert scripted.clock.stages == [StageBegin(*stage) for stage in stages]


def test_another_stage_forgets_phases_but_no_steps():
    scripted = Scripted()
    for _ in range(3):
        scripted.pass_(**STEP)
    scripted.clock.stage_begins("settled")
    assert (scripted.clock.phases(), scripted.clock.last_phases()) == ([], None)
    scripted.pass_(**STEP)
    assert scripted.clock.phases() == [Phases(**STEP)]
    assert scripted.clock.last_phases() == Phases(**STEP)
    assert scripted.clock.steps == 4


class Later(HostClock):
    """As of an accelerator: some marks are still to come."""

    comes_s = float("inf")

    def has_passed(self, mark):
        return mark < self.comes_s


def test_the_last_phases_are_those_of_a_step_that_is_over():
    scripted = Scripted()
    later = Later(lambda: scripted.now_s)
    scripted.clock = StepClock(later)
    for _ in range(2):
        scripted.pass_(**STEP)
    scripted.pass_(**STEP | {"network_s": 16.0})
    assert scripted.clock.last_phases().network_s == 16.0
    later.comes_s = scripted.now_s  # the end of the last step has not come yet
    assert scripted.clock.last_phases().network_s == 8.0


def test_a_step_that_ended_unseen_is_counted_without_phases():
    scripted = Scripted()
    scripted.pass_(**STEP)
    scripted.pass_(**STEP)
    scripted.clock.forward_begins(is_synchronised=True)
    assert not scripted.clock.misses_end
    scripted.passes(2.0)
    scripted.clock.forward_ends()
    scripted.passes(4.0)
    assert scripted.clock.misses_end
    scripted.clock.step_ended_unseen()
    assert not scripted.clock.misses_end
    scripted.pass_(**STEP)
    assert list(scripted.clock.step_s) == [15.0, 6.0, 15.0]
    assert scripted.clock.phases() == [Phases(**STEP)]
    scripted.pass_(**STEP)
    assert scripted.clock.phases() == [Phases(**STEP)] * 2


def test_some_steps_are_kept():
    scripted = Scripted()
    for _ in range(2 * KEPT_STEPS):
        scripted.pass_(**STEP)
    assert len(scripted.clock.phases()) == KEPT_STEPS
    assert len(scripted.clock.step_s) == 2 * KEPT_STEPS - 1


WRAPPERS = {"ddp": DistributedDataParallel, "sharded": ShardedDataParallel}


def _seen(group, name):
    model = WRAPPERS[name](network(), record_steps=50)  # another stage would forget phases
    readings = count()  # instead of seconds: no machine is too busy for it
    model._clock._clock = HostClock(lambda: float(next(readings)))
    model._clock._now_s = lambda: float(next(readings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        if step % 3:
            with model.no_sync():
                model(batch(step, group.rank())).sum().backward()
        model(batch(step, group.rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(step, group.rank()))
    phases = model._clock.phases()
    lengths = [[one.seconds(phase) for phase in PHASES] for one in phases]
    return lengths, list(model._clock.step_s)


class FirstUnused(nn.Module):
    """The gradient that one would expect last never comes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, value):
        return self.second(value)


def _steps_seen(group, how):
    model, options = FirstUnused(), {"find_unused_parameters": True}
    if how == "watched":
        model = TorchDDP(model, **options)
        asked = watch(model)
    else:
        options |= {"record_steps": 2} if how == "planning" else {"plan": PLAN}
        model = asked = DistributedDataParallel(model, **options)
    seen = []
    for step in range(8):
        model(batch(step, group.rank())).sum().backward()
        seen.append(asked.metrics()["step"])
    return seen


PLAN = Plan(
    planner="made",
    buckets=(
        Bucket(tensors=("second.bias", "second.weight"), collective="native"),
        Bucket(tensors=("first.bias", "first.weight"), collective="native"),
    ),
)


def _evaluates_with_gradients(group, how):
    model, options = network(), {"record_steps": 3} if how == "planning" else {"plan": MADE}
    if how == "watched":
        model = TorchDDP(model)
        asked = watch(model)
    else:
        model = asked = DistributedDataParallel(model, **options)
    seen = []
    for step in range(9):
        model(batch(step, group.rank())).sum().backward()
        for _ in range(step % 3):
            model(batch(step, group.rank()))
        seen.append(asked.metrics()["step"])
    return seen


MADE = plan_of(2, 3)


@pytest.mark.parametrize("how", ["planning", "given", "watched"])
def test_forward_passes_alone_are_no_steps(how, tmp_path):
    steps = list(range(1, 10))
    assert on_processes(2, _evaluates_with_gradients, how, scratch=tmp_path) == [steps] * 2


@pytest.mark.parametrize("how", ["planning", "given", "watched"])
def test_the_last_gradient_is_looked_for_where_it_was(how, tmp_path):
    """The first pass is over when the second one begins."""
    steps = [0, *range(2, 9)]
    assert on_processes(2, _steps_seen, how, scratch=tmp_path) == [steps] * 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_tell_the_clock(name, tmp_path):
    for lengths, step_s in on_processes(2, _seen, name, scratch=tmp_path):
        assert len(lengths) == len(step_s) == 11
        for one in lengths:
            assert all(seconds >= 0 for seconds in one)
            assert min(one[:3]) > 0
        # The clock of steps is read next to that of phases, with no other reading between them.
        for one, whole in zip(lengths, step_s, strict=True):
            assert abs(sum(one) - whole) <= 1

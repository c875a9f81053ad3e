"""Numbers of the last step, at once and without asking anybody."""

import pytest
import torch
from ranks import on_processes
from small_training import MOST_STEPS, QUICK, batch, network, plan_of
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, ShardedDataParallel, Span, Timeline, watch
from gradweave._src.clocks import HostClock
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.runtime.reporting.metrics import LiveNumbers
from gradweave._src.runtime.reporting.step_clock import StepClock

KEYS = ["step", "step_s", "exposed_s", "overlap", "messages", "stage", "predicted_s"]


class Scripted:
    """A clock and a recorder for whom seconds pass where a test says so."""

    def __init__(self):
        self.now_s = 0.0
        self.clock = StepClock(HostClock(lambda: self.now_s))
        self.recorder = SpanRecorder({}, clock=HostClock(lambda: self.now_s))

    def step(self):
        """A second of each pass; of three seconds of messages one is hidden."""
        self.clock.forward_begins(is_synchronised=True)
        self.recorder.begin()
        self.now_s += 1.0
        self.clock.forward_ends()
        self.recorder.backward()
        ready_s = self.recorder.ready()
        self.now_s += 1.0
        self.clock.gradients_ready()
        self.now_s += 2.0
        self.recorder.done(ready_s, [], 8)
        self.clock.messages_done()


def predicted(*, hidden_s):
    spans = (
        Span(lane="backward", label="", start_s=0.0, end_s=hidden_s, tensors=()),
        Span(lane="communication", label="", start_s=0.0, end_s=8.0, tensors=("a",)),
    )
    return Timeline(spans=spans)


def test_what_is_not_known_is_left_out():
    scripted = Scripted()
    numbers = LiveNumbers(scripted.clock, None)
    found = numbers.of(stage="not begun", messages=None, predicted=None)
    assert found == {"step": 0, "stage": "not begun"}
    scripted.step()
    found = numbers.of(stage="not begun", messages=3, predicted=None)
    assert found == {"step": 1, "messages": 3, "stage": "not begun"}
    scripted.step()
    found = numbers.of(stage="recording", messages=3, predicted=None)
    assert found == {
        "step": 2,
        "step_s": 4.0,
        "exposed_s": 2.0,
        "messages": 3,
        "stage": "recording",
    }


def test_overlap_is_measured_where_messages_are_noted():
    scripted = Scripted()
    for _ in range(2):
        scripted.step()
    noting = LiveNumbers(scripted.clock, scripted.recorder)
    found = noting.of(stage="settled", messages=1, predicted=predicted(hidden_s=4.0))
    assert list(found) == KEYS
    assert found["overlap"] == pytest.approx(1 / 3)
    assert found["predicted_s"] == 8.0


def test_overlap_is_of_predicted_messages_otherwise():
    scripted = Scripted()
    for _ in range(2):
        scripted.step()
    numbers = LiveNumbers(scripted.clock, None)
    for one in (predicted(hidden_s=4.0), predicted(hidden_s=10.0)):
        found = numbers.of(stage="settled", messages=1, predicted=one)
        assert found["overlap"] == pytest.approx(6 / 8)
        assert found["predicted_s"] == one.iteration_s


WRAPPERS = {"ddp": DistributedDataParallel, "sharded": ShardedDataParallel}


def in_every_step(group, name):
    model = WRAPPERS[name](network(), **QUICK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = [model.metrics()]
    more = 3
    while more and len(found) < MOST_STEPS:
        model(batch(len(found), group.rank())).sum().backward()
        optimizer.step()
        found.append(model.metrics())
        more -= model.findings().stage == "settled"
    return found, model.findings().plan, model.findings().predicted


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_tell_them_in_every_step(name, tmp_path):
    for found, plan, predicted in on_processes(2, in_every_step, name, scratch=tmp_path):
        first, *_, last = found
        assert first["step"] == 0
        assert first["stage"] == "not begun"
        assert [one["step"] for one in found] == list(range(len(found)))
        assert all("step_s" in one for one in found[2:])
        assert list(last) == KEYS
        assert last["stage"] == "settled"
        assert last["messages"] == len(plan.buckets)
        assert last["predicted_s"] == predicted.iteration_s
        assert 0 <= last["overlap"] <= 1
        assert 0 <= last["exposed_s"] <= last["step_s"]
        for one in found:
            assert all(isinstance(value, float | int | str) for value in one.values())


def of_torchs_own_buckets(group):
    ours = DistributedDataParallel(network(), record_steps=50)
    torchs = TorchDDP(network())
    watched = watch(torchs)
    found = []
    for model in (ours, torchs):
        for step in range(4):
            model(batch(step, group.rank())).sum().backward()
    found += [ours.metrics(), watched.metrics()]
    return found


def test_torchs_own_buckets_are_counted(tmp_path):
    for ours, torchs in on_processes(2, of_torchs_own_buckets, scratch=tmp_path):
        assert (ours["messages"], torchs["messages"]) == (1, 1)
        assert (ours["step"], torchs["step"]) == (4, 4)
        assert torchs["stage"] == "recording"
        assert {"step_s", "exposed_s", "overlap"} <= set(torchs)


def of_a_given_plan(group):
    model = DistributedDataParallel(network(), plan=plan_of(2, 3))
    for step in range(3):
        model(batch(step, group.rank())).sum().backward()
    return model.metrics()


def test_a_given_plan_predicts_nothing(tmp_path):
    for found in on_processes(2, of_a_given_plan, scratch=tmp_path):
        assert (found["messages"], found["stage"]) == (2, "settled")
        assert "predicted_s" not in found
        assert "overlap" not in found

"""The emulated accelerator, with a clock of its own: it takes exactly the time the trace says."""

import pytest
import torch
from hypothesis import given, settings
from ranks import on_threads
from strategies import traces
from torch.nn.parallel import DistributedDataParallel

from gradweave import RequestError, Tensor, Trace
from gradweave._src.clocks import HostClock
from gradweave._src.measure.backward import record_by_clock
from gradweave._src.workloads.replay import Dispatching, Replay, Waiting

BATCH = torch.zeros(1)


class Scripted:
    """Time passes only while somebody waits."""

    def __init__(self):
        self.time_s = 100.0

    def now_s(self):
        return self.time_s

    def wait_until(self, moment_s):
        self.time_s = max(self.time_s, moment_s)


def made(*tensors):
    return Trace(name="made", origin="measured", source="made up", batch_size=1, tensors=tensors)


def tensor(name, elements=3, ready_s=1.0, forward_s=0.5, bytes_per_element=4):
    return Tensor(
        name=name,
        elements=elements,
        bytes_per_element=bytes_per_element,
        ready_s=ready_s,
        forward_s=forward_s,
    )


def recorded(trace, timer):
    model = Replay(trace, timer=timer)

    def step():
        model.zero_grad()
        model(BATCH).backward()

    clock = HostClock(timer.now_s)
    return record_by_clock(
        model, step, name="again", batch_size=1, warmup=0, iterations=2, clock=clock
    ).trace


@settings(max_examples=30)
@given(trace=traces(most=8))
def test_recording_a_replay_gives_the_trace_again(trace):
    """The recorder reads the same clock, so even the times are equal, up to rounding."""
    trace = trace.with_bytes_per_element(4)
    again = recorded(trace, Scripted())
    assert [t.name for t in again.tensors] == [t.name for t in trace.tensors]
    assert [t.elements for t in again.tensors] == [t.elements for t in trace.tensors]
    assert again.ready_s.tolist() == pytest.approx(trace.ready_s.tolist(), abs=1e-9)
    assert again.forward_s == pytest.approx(trace.forward_s, abs=1e-9)


def test_a_late_host_catches_up():
    timer = Scripted()
    model = Replay(made(tensor("b", ready_s=1.0), tensor("a", ready_s=2.0)), timer=timer)
    loss = model(BATCH)
    assert timer.time_s == 101.0
    hooked = []
    model.b.register_post_accumulate_grad_hook(lambda _: hooked.append(timer.time_s))
    model.b.register_post_accumulate_grad_hook(lambda _: timer.wait_until(timer.time_s + 0.75))
    loss.backward()
    assert hooked == [102.0]  # backward began at 101
    assert timer.time_s == 103.0  # not 103.75


def test_a_layer_that_waits_for_its_parameters_delays_what_follows():
    """Unlike a host that is late by itself, which catches up."""
    timer = Scripted()
    layers = (tensor("b.w", ready_s=0.5, forward_s=2.0), tensor("a.w", forward_s=1.0))
    model = Replay(made(*layers), timer=timer)

    def late(*_):
        timer.time_s += 5.0

    model.get_submodule("b").register_forward_pre_hook(late)
    began_s = timer.time_s
    model(BATCH)
    assert timer.time_s - began_s == 1.0 + 5.0 + 2.0


def test_a_group_that_waits_for_its_parameters_delays_what_follows():
    timer = Scripted()
    trace = made(
        tensor("c", ready_s=1.0), tensor("b", ready_s=2.5), tensor("a", ready_s=4.0, forward_s=1.0)
    )
    model = Replay(trace, timer=timer, gradient=2.0).in_groups([2, 1])
    loss = model(BATCH)
    assert timer.time_s == 102.0
    first, last = model.groups
    first.register_forward_pre_hook(lambda *_: timer.wait_until(timer.time_s + 8.0))
    last.register_full_backward_hook(lambda *_: timer.wait_until(timer.time_s + 16.0))
    loss.backward()
    assert timer.time_s == 106.0
    model(BATCH).backward()
    assert timer.time_s == 106.0 + 8.0 + 2.0 + 2.5 + 16.0 + 1.5
    assert [len(list(group.parameters())) for group in model.groups] == [1, 2]
    assert all((p.grad == 4.0).all() for p in model.parameters())  # of two passes


def test_names_keep_their_dots_and_sizes_their_width():
    model = Replay(
        made(
            tensor("head", bytes_per_element=8),
            tensor("layers.0.bias", elements=1, bytes_per_element=2),
            tensor("layers.0.weight"),
        )
    )
    found = {name: (p.numel(), p.dtype) for name, p in model.named_parameters()}
    assert found == {
        "head": (3, torch.float64),
        "layers.0.bias": (1, torch.float16),
        "layers.0.weight": (3, torch.float32),
    }


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (tensor("a", bytes_per_element=3), "'a' has 3 bytes per element; a replay knows 2, 4, 8"),
        (tensor("forward"), "'forward' cannot be the name of a parameter"),
    ],
)
def test_traces_that_cannot_be_replayed(bad, complaint):
    with pytest.raises(RequestError, match=complaint):
        Replay(made(bad))


def test_evaluation_needs_no_graph():
    with torch.no_grad():
        assert not Replay(made(tensor("a")), timer=Scripted())(BATCH).requires_grad


@pytest.mark.parametrize("timer", [Waiting(), Dispatching()])
def test_real_timers_wait_long_enough(timer):
    until_s = timer.now_s() + 0.01
    timer.wait_until(until_s)
    assert timer.now_s() >= until_s


def averaged(group):
    model = Replay(made(tensor("b"), tensor("a")), gradient=group.rank() + 1.0, timer=Scripted())
    wrapped = DistributedDataParallel(model, process_group=group)
    for _ in range(2):
        model.zero_grad()
        wrapped(BATCH).backward()
    return [p.grad.tolist() for p in model.parameters()]


def test_gradients_are_real_ones():
    assert on_threads(2, averaged) == [[[1.5] * 3] * 2] * 2

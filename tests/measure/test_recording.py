"""Recording with a scripted clock: what comes when, for all kinds of models."""

import json
import re
from itertools import count

import pytest
import torch
from ranks import on_threads
from torch import nn

from gradweave import RequestError, Trace
from gradweave._src import files
from gradweave._src.cli import main
from gradweave._src.clocks import HostClock
from gradweave._src.measure.backward import record_by_clock, record_trace
from gradweave._src.measure.models import build_model, loss_of, random_input


def ticking(step_s=1.0):
    """Every look at the clock is one step later."""
    ticks = count()
    return HostClock(lambda: next(ticks) * step_s)


def recorded(model, step, **options):
    options = {"warmup": 1, "iterations": 3, "clock": ticking(), **options}
    return record_by_clock(model, step, name="made", batch_size=2, **options)


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))


def forward_backward(model, features=3):
    def step():
        model.zero_grad()
        model(torch.ones(2, features)).sum().backward()

    return step


def test_a_chain_of_layers():
    """Looks at the clock: model, layer 0, ReLU, layer 2, end of forward, then the gradients."""
    model = two_layers()
    trace = recorded(model, forward_backward(model)).trace
    assert [tensor.name for tensor in trace.tensors] == ["2.weight", "0.bias", "0.weight"]
    assert [tensor.elements for tensor in trace.tensors] == [8, 4, 12]
    assert trace.ready_s.tolist() == [1.0, 2.0, 3.0]
    # Layer 0 is needed at 1 s and layer 2 at 3 s; forward takes 4 s and begins with layer 0's.
    assert {t.name: t.forward_s for t in trace.tensors} == {
        "0.weight": 1.0,
        "0.bias": 2.0,
        "2.weight": 1.0,
    }
    assert trace.forward_s == 4.0
    assert (trace.origin, trace.batch_size) == ("measured", 2)


def test_hooks_are_gone_afterwards():
    model = two_layers()
    recorded(model, forward_backward(model))
    assert not model._forward_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_frozen_parameters_are_left_out():
    model = two_layers()
    model[0].requires_grad_(requires_grad=False)
    trace = recorded(model, forward_backward(model)).trace
    assert [tensor.name for tensor in trace.tensors] == ["2.weight"]


def test_shared_parameters_are_one_tensor_ready_after_their_last_use():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    trace = recorded(model, forward_backward(model)).trace
    assert sorted(tensor.name for tensor in trace.tensors) == ["0.bias", "0.weight", "1.bias"]
    assert trace.tensors[0].name == "1.bias"


def test_several_losses_count_until_the_last():
    model = two_layers()

    def step():
        model.zero_grad()
        output = model(torch.ones(2, 3))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()

    trace = recorded(model, step).trace
    assert trace.ready_s.tolist() == [4.0, 5.0, 6.0]


def test_parameters_without_a_gradient_are_reported():
    model = nn.ModuleDict({"always": nn.Linear(3, 1), "rarely": nn.Linear(3, 1)})

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model
            self.never = nn.Parameter(torch.zeros(5))
            self.calls = 0

        def forward(self, features):
            self.calls += 1
            used = self.parts["always"](features)
            return used if self.calls % 2 else used + self.parts["rarely"](features)

    module = Sometimes()
    recording = recorded(module, forward_backward(module), warmup=0, iterations=4)
    assert recording.without_gradient == {
        "never": 4,
        "parts.rarely.weight": 2,
        "parts.rarely.bias": 2,
    }
    assert recording.reordered == 2
    assert {tensor.name for tensor in recording.trace.tensors} == dict(
        module.named_parameters()
    ).keys()


def test_parameters_that_another_module_uses():
    """Attention multiplies with its output projection's weight without calling the projection."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def step():
        model.zero_grad()
        one = torch.ones(1, 3, 4)
        model(one, one, one)[0].sum().backward()

    trace = recorded(model, step).trace
    assert {tensor.name for tensor in trace.tensors} == dict(model.named_parameters()).keys()


def test_the_median_ignores_an_outlier():
    model = two_layers()
    ticks = [float(tick) for tick in range(8)] * 5
    ticks[7] = 1000.0  # the last gradient of the first of five iterations
    clock = HostClock(iter(ticks).__next__)
    trace = recorded(model, forward_backward(model), warmup=0, iterations=5, clock=clock).trace
    assert trace.backward_s == 3.0


def test_what_cannot_be_recorded():
    model = two_layers()
    with pytest.raises(RequestError, match="did not call the model"):
        recorded(model, lambda: None)
    with pytest.raises(RequestError, match="step\\(\\) must call backward"):
        recorded(model, lambda: model(torch.ones(2, 3)))
    with pytest.raises(RequestError, match="no parameters that require a gradient"):
        recorded(nn.ReLU(), lambda: None)


def slow_and_fast(group):
    model = two_layers()
    clock = ticking(step_s=1.0 + group.rank())
    return recorded(model, forward_backward(model), group=group, clock=clock).trace


def test_the_slowest_rank_counts():
    fast, slow = on_threads(2, slow_and_fast)
    assert fast == slow
    assert fast.ready_s.tolist() == [2.0, 4.0, 6.0]
    assert fast.forward_s == 8.0


def test_inputs():
    assert random_input("2x3").shape == (2, 3)
    integers = random_input("4x5:7")
    assert integers.shape == (4, 5)
    assert integers.dtype == torch.int64
    assert 0 <= integers.min() <= integers.max() < 7
    for text in ("", "x", "0x3", "3x", "2x2:0", "2:x", "٤x٤"):
        with pytest.raises(RequestError, match="is no input; write 32x3x224x224"):
            random_input(text)


def test_losses():
    weight = torch.ones(4, requires_grad=True)
    assert loss_of(weight * 3) == 3
    assert loss_of((weight, [weight * 2], {"more": weight * 4})) == 7
    assert loss_of({"loss": weight.sum(), "logits": weight}) == 4
    with pytest.raises(RequestError, match="returned str without any gradient"):
        loss_of("text")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("torch.nn", "names no factory; write it as package.module:factory"),
        (":f", "names no factory"),
        ("torch.nn:", "names no factory"),
        ("no.such.module:f", "cannot import the model 'no.such.module:f': .*No module named 'no'"),
        ("..nn:f", "cannot import the model '..nn:f'"),
        ("torch.nn:NoSuch", "'torch.nn' has no factory 'NoSuch'; name a function or class"),
        ("torch.nn:Sequental", r"'torch.nn' has no factory 'Sequental', did you mean Sequential\?"),
        ("torch.nn:Linear", "could not be called without arguments: TypeError: .* missing 2 req"),
        ("torch:float32", "'torch' has no factory 'float32'"),
        ("time:time", "returned a float, not a torch module"),
    ],
)
def test_models_that_are_not(text, complaint):
    with pytest.raises(RequestError, match=complaint):
        build_model(text)


def test_record_writes_a_trace(capsys, tmp_path):
    output = tmp_path / "trace.json"
    argv = ["record", "--model", "pytorchcv.models.resnet_cifar:resnet20_cifar10"]
    argv += ["--input", "2x3x32x32", "--iterations", "2", "--output", str(output)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    trace = files.read(output, Trace)
    assert (trace.name, trace.batch_size, len(trace.tensors)) == ("resnet20_cifar10", 2, 65)
    assert "resnet20_cifar10: forward" in captured.out
    assert trace.tensors[0].name.startswith("output.")


MODELS_OF_ONES_OWN = """
import torch

def good():
    return torch.nn.Linear(3, 2)

def bad():
    raise KeyError("layers")

def frozen():
    return good().requires_grad_(False)
"""


@pytest.fixture
def models_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "of_ones_own.py").write_text(MODELS_OF_ONES_OWN)
    (tmp_path / "half_written.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "shape", "complaint"),
    [
        ("of_ones_own:bad", "2x3", "could not be called without arguments: KeyError: 'layers'"),
        ("of_ones_own:god", "2x3", "'of_ones_own' has no factory 'god', did you mean good?"),
        ("half_written:make", "2x3", "cannot import the model 'half_written:make': SyntaxError"),
        ("of_ones_own:good", "2x4", "the model does not train on --input 2x4: RuntimeError: mat1"),
        ("of_ones_own:good", "2x3:7", "the model does not train on --input 2x3:7: RuntimeError"),
        ("of_ones_own:good", "2y3", "'2y3' is no input"),
        ("of_ones_own:good", "999999999x999999999", "there is no input '999999999x999999999'"),
        ("of_ones_own:frozen", "2x3", "no parameters that require a gradient"),
    ],
)
def test_a_mistake_in_a_model_of_ones_own_is_one_line(
    capsys, models_of_ones_own, model, shape, complaint
):
    assert main(["record", "--model", model, "--input", shape]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.startswith("gradweave record: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_spread_is_shown(capsys, models_of_ones_own):
    argv = ["record", "--model", "of_ones_own:good", "--input", "2x3", "--iterations", "4"]
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    for what in ("forward", "backward"):
        low_s, high_s = row[f"{what}_quartiles_s"]
        assert 0 <= low_s <= high_s
    assert main(argv) == 0
    title = capsys.readouterr().out.splitlines()[0]
    times = r"[\d.]+ ms \([\d.]+ to [\d.]+\)"
    assert re.match(f"good: forward {times}, backward {times}, 2 tensors; medians of 4 iter", title)


class Slowing(HostClock):
    """Every look at it is ``step_s`` later."""

    step_s = 1.0

    def __init__(self):
        self.read_s = 0.0
        super().__init__(self.tick)

    def tick(self):
        self.read_s += self.step_s
        return self.read_s


def test_half_of_the_iterations_lie_in_the_spread():
    model = two_layers()
    step = forward_backward(model)
    numbers, clock = count(1), Slowing()

    def slower():
        clock.step_s = float(next(numbers))
        step()

    recording = recorded(model, slower, warmup=0, iterations=5, clock=clock)
    assert recording.forward == (8.0, 16.0)
    assert recording.backward == (6.0, 12.0)
    alone = recorded(model, step, warmup=0, iterations=1)
    assert alone.forward == (4.0, 4.0)


def without_backward(group):
    """On one rank only; the other would wait for it."""
    model = nn.Linear(3, 1)

    def step():
        loss = model(torch.ones(2, 3)).sum()
        if group.rank() == 0:
            loss.backward()

    with pytest.raises(RequestError) as caught:
        record_trace(model, step, name="made", batch_size=2, warmup=0, iterations=1, group=group)
    return str(caught.value)


def test_all_ranks_are_told_where_one_has_no_gradients():
    said = "no parameter got a gradient; step() must call backward (rank 1)"
    assert on_threads(2, without_backward) == [said] * 2

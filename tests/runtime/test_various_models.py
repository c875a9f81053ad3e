"""Models and habits of all kinds: planned for, and trained bit for bit as with torch's wrapper."""

import pytest
import torch
from small_training import MOST_STEPS, QUICK, batch, network, on_two, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.runtime.ddp import DistributedDataParallel as Ours


def partly_frozen():
    model = network()
    model[2].requires_grad_(requires_grad=False)
    return model


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(6, 9), nn.Linear(9, 6)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = nn.Linear(9, 6)
        self.again.weight = self.out.weight

    def forward(self, value):
        return self.again(torch.tanh(self.into(self.out(torch.tanh(self.into(value))))))


def single_tensor():
    torch.manual_seed(0)
    return nn.Linear(6, 2, bias=False)


class Sometimes(nn.Module):
    """A layer that every second pass leaves out, and one that none takes."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = network(), nn.Linear(2, 2), nn.Linear(2, 2)
        self.passes = 0

    def forward(self, value):
        self.passes += 1
        value = self.always(value)
        return self.sometimes(value) if self.passes % 2 else value


MODELS = {
    "partly frozen": (partly_frozen, {}),
    "tied weights": (Tied, {}),
    "a single tensor": (single_tensor, {}),
    "unused layers": (Sometimes, {"find_unused_parameters": True}),
}


def whole_course(group, kind):
    make, options = MODELS[kind]
    ours = {**QUICK, **options}
    return same_bits(group, ours, options, make=make, steps=10, until_settled=True)


@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_course(tmp_path, kind):
    """Seconds: it records, calibrates, plans and tries."""
    assert on_two(whole_course, kind, scratch=tmp_path) == [True, True]


def scaled(wrapped, rank, *, steps=MOST_STEPS):
    """Mixed precision with clipping, as torch's documentation has it; steps and weights."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    step = 0
    while step < steps and not (
        isinstance(wrapped, Ours) and wrapped.findings().stage == "settled"
    ):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = wrapped(batch(step, rank)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        step += 1
    return step, [parameter.detach().clone() for parameter in wrapped.parameters()]


def same_scaled(group):
    wrapped = Ours(network(), **QUICK)
    steps, ours = scaled(wrapped, group.rank())
    _, torchs = scaled(TorchDDP(network()), group.rank(), steps=steps)
    is_planned = wrapped.plan is not None
    return is_planned, all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_mixed_precision_with_clipping(tmp_path):
    assert on_two(same_scaled, scratch=tmp_path) == [(True, True)] * 2


def hooked(group):
    """Forward hooks of the user's on the wrapper, while plans change."""
    wrapped = Ours(network(), **QUICK)
    seen = []
    wrapped.register_forward_pre_hook(lambda _, inputs: seen.append(("before", len(inputs))))
    wrapped.register_forward_hook(lambda _, inputs, output: seen.append(("after", len(output))))
    steps = 0
    while wrapped.findings().stage != "settled":
        assert steps < MOST_STEPS
        wrapped(batch(steps, group.rank())).sum().backward()
        steps += 1
    return seen == [("before", 1), ("after", 4)] * steps


def test_forward_hooks_on_the_wrapper_stay(tmp_path):
    assert on_two(hooked, scratch=tmp_path) == [True, True]

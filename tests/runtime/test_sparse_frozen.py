"""What is frozen gets no gradient, and what has been gathered for it waits.

Gradients are whole numbers, the learning rate is 1: what was applied are the weights.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src import hooks
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK

NUMEL = 40
ONE_LAYER_MB = NUMEL * 4 / 2**20
NAMES = ["first.weight", "second.weight"]

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")


class Layers(nn.Module):
    """The gradient of the second layer is nine times larger."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(NUMEL, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs):
        return self.first(inputs) + self.second(9 * inputs)


def whole_numbers(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (1, NUMEL), generator=generator).float()


def wrapped_by(whose, model, settings, options):
    """The wrapper, and what asks for its state."""
    options = {"find_unused_parameters": True, **options}
    if whose == "ours":
        whole = GTopK(**settings, whole_model=True)
        wrapped = DistributedDataParallel(model, compression=whole, **options)
        return wrapped, wrapped.sparse_state_dict
    # The layer that is declared last has torch's first bucket for itself.
    wrapped = TorchDDP(model, bucket_cap_mb=ONE_LAYER_MB, **options)
    state = hooks.SparseState(wrapped, GTopK(**settings))
    wrapped.register_comm_hook(state, hooks.gtopk)
    return wrapped, state.state_dict


def thawed(group, whose, options, set_to_none):
    """The second layer is frozen in two of seven steps: what is lost, and what has moved."""
    model = Layers()
    wrapped, state_dict = wrapped_by(whose, model, {"density": 0.1}, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    produced = {name: torch.zeros(1, NUMEL) for name in NAMES}
    moved = []
    for step in range(7):
        is_frozen = step in (3, 4)
        model.second.requires_grad_(not is_frozen)
        weight, state = model.second.weight.clone(), state_dict()
        optimizer.zero_grad(set_to_none=set_to_none)
        before = model.second.weight.grad
        inputs = whole_numbers(step, group.rank())
        wrapped(inputs).sum().backward()
        produced["first.weight"] += inputs
        if is_frozen:
            gradient = model.second.weight.grad
            moved.append(gradient is not before or (gradient is not None and gradient.any().item()))
        else:
            produced["second.weight"] += 9 * inputs
        optimizer.step()
        if is_frozen:
            waits = [one["residuals"]["values"]["second.weight"] for one in (state, state_dict())]
            moved += [not torch.equal(weight, model.second.weight), not torch.equal(*waits)]
            assert waits[0].any()
    state = state_dict()
    lost = []
    for name, parameter in model.named_parameters():
        total = torch.stack([produced[name], state["residuals"]["values"][name]])
        dist.all_reduce(total)
        lost.append((total[0] - total[1] + group.size() * parameter).abs().sum().item())
    return lost, moved


@pytest.mark.parametrize("whose", ["ours", "torch's"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_frozen_waits_and_nothing_is_lost(tmp_path, whose, options, set_to_none):
    results = on_processes(2, thawed, whose, options, set_to_none, scratch=tmp_path)
    assert results == [([0.0, 0.0], [False] * 6)] * 2


def kept(group, dense_below):
    """Two steps, and two with the second layer frozen and its last gradient left where it is.

    Whether there are residuals and velocities, and whether they stay, as that gradient does.
    """
    model = Layers()
    settings = {"density": 0.3, "momentum": 0.5, "clip_norm": 1e3, "dense_below": dense_below}
    wrapped, state_dict = wrapped_by("ours", model, settings, {"gradient_as_bucket_view": True})
    states, gradients = [], []
    for step in range(4):
        trained = model if step < 2 else model.first
        model.second.requires_grad_(step < 2)
        trained.zero_grad()
        wrapped(whole_numbers(step, group.rank())).sum().backward()
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        states.append(state_dict())
        gradients.append(model.second.weight.grad.clone())
    found = [all(torch.equal(gradients[1], later) for later in gradients[2:])]
    for kind in ("residuals", "velocities"):
        before, *later = (state[kind]["values"]["second.weight"] for state in states[1:])
        found += [before.any().item(), all(torch.equal(before, one) for one in later)]
    return found


@pytest.mark.parametrize("dense_below", [0, NUMEL + 1])
def test_what_is_there_when_a_layer_is_frozen_stays(tmp_path, dense_below):
    """Also of parameters that travel whole, which have velocities alone."""
    results = on_processes(2, kept, dense_below, scratch=tmp_path)
    assert results == [[True, dense_below == 0, True, True, True]] * 2


def frozen_on_one(group, options):
    """Rank 0 freezes what rank 1 trains: torch gives both the same gradient."""
    model = Layers()
    wrapped, _ = wrapped_by("ours", model, {"density": 0.1}, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        model.second.requires_grad_(bool(group.rank()) or step not in (2, 3))
        optimizer.zero_grad()
        wrapped(whole_numbers(step, group.rank())).sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_ranks_may_freeze_differently(tmp_path, options):
    first, second = on_processes(2, frozen_on_one, options, scratch=tmp_path)
    assert first == second

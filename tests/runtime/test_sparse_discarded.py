"""Gradients that are thrown away before any step of an optimizer leave no trace."""

from dataclasses import dataclass, field
from functools import partial

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
# Bytes of one layer: torch's own wrapper then has several buckets.
ONE_LAYER_MB = 6 * 6 * 4 / 2**20


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))


def wrapped_by(whose, model, scaler=None, **options):
    """The wrapper, and what asks for its state."""
    settings = {"density": 0.1, "momentum": 0.5}
    if whose == "ours":
        whole = GTopK(**settings, whole_model=True)
        wrapped = DistributedDataParallel(model, compression=whole, grad_scaler=scaler, **options)
        return wrapped, wrapped.sparse_state_dict
    wrapped = TorchDDP(model, bucket_cap_mb=ONE_LAYER_MB, **options)
    state = hooks.SparseState(wrapped, GTopK(**settings), grad_scaler=scaler)
    wrapped.register_comm_hook(state, hooks.gtopk)
    return wrapped, state.state_dict


def take_step(model, optimizer, scaler, *, by_hand):
    if by_hand:
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad.data)
    elif scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def all_that_is_left(model, state):
    ends = [*model.parameters()]
    for kind in ("residuals", "velocities"):
        values = state[kind]["values"]
        ends += [values[name] / state[kind]["scale"] for name in sorted(values)]
    return [end.detach().clone() for end in ends]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a script zeroes gradients and takes steps."""

    zeroes_module: bool = False  # or the optimizer's parameters
    zeroes_late: bool = False  # after forward, or before
    set_to_none: bool = True
    micro: int = 1  # batches
    steps_by: str = "optimizer"  # "scaler", "hand"
    optimizer: dict = field(default_factory=dict)
    wrapper: dict = field(default_factory=dict)


WAYS = {
    "plain": Way(),
    "in place": Way(set_to_none=False),
    "by the module": Way(zeroes_module=True, wrapper={"gradient_as_bucket_view": True}),
    "by the module, in place": Way(
        zeroes_module=True, set_to_none=False, wrapper={"gradient_as_bucket_view": True}
    ),
    "scaled": Way(steps_by="scaler"),
    "scaled, in place": Way(steps_by="scaler", set_to_none=False),
    "after forward": Way(zeroes_late=True, optimizer={"fused": True}),
    "by hand": Way(steps_by="hand"),
    "by hand, in place": Way(steps_by="hand", set_to_none=False),
    "micro-batches": Way(micro=2, set_to_none=False),
}


def trained(group, whose, passes, way):
    """Weights, residuals and velocities after these passes."""
    model = network()
    scaler = None
    if way.steps_by == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    wrapped, state_dict = wrapped_by(whose, model, scaler, **way.wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **way.optimizer)
    zeroed = model if way.zeroes_module else optimizer
    zero = partial(zeroed.zero_grad, set_to_none=way.set_to_none)

    def backward(number, *, adds=False):
        if not way.zeroes_late and not adds:
            zero()
        torch.manual_seed(1000 * number + group.rank())
        *micros, last = torch.randn(4 * way.micro, 6).chunk(way.micro)
        for micro in micros:
            with wrapped.no_sync():
                wrapped(micro).square().mean().backward()
        loss = wrapped(last).square().mean()
        if way.zeroes_late and not adds:
            zero()
        (loss if scaler is None else scaler.scale(loss)).backward()

    for number, kind in passes:
        backward(number)
        if kind == "discarded with another":
            backward(number + 50, adds=True)
        elif kind == "discarded when clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif kind == "applied":
            take_step(model, optimizer, scaler, by_hand=way.steps_by == "hand")
    zero()
    return all_that_is_left(model, state_dict())


PASSES = [
    (0, "applied"),
    (10, "discarded"),
    (1, "applied"),
    (11, "discarded"),
    (12, "discarded when clipped"),
    (2, "applied"),
    (3, "applied"),
    (13, "discarded with another"),
    (4, "applied"),
    (14, "discarded"),
]


def same_as_without(group, whose):
    """For each way: whether all is equal to a training without the discarded passes."""
    found = {}
    for name, way in WAYS.items():
        ends = [
            trained(group, whose, passes, way)
            for passes in (PASSES, [one for one in PASSES if one[1] == "applied"])
        ]
        found[name] = all(torch.equal(*pair) for pair in zip(*ends, strict=True))
        assert len(ends[1]) == 18
        assert all(end.any() for end in ends[1][6:12])
    return found


@pytest.mark.parametrize("whose", ["ours", pytest.param("torch's", marks=pytest.mark.long)])
def test_a_discarded_pass_leaves_every_bit(tmp_path, whose):
    """Of weights, residuals and velocities, and of the state after the last pass."""
    results = on_processes(2, same_as_without, whose, scratch=tmp_path)
    assert results == [dict.fromkeys(WAYS, True)] * 2


def whole_numbers(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (1, NUMEL), generator=generator).float()


def linear():
    """Its gradient is the sum of its inputs."""
    model = nn.Linear(NUMEL, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def missing(group, wrapped, state, produced):
    """Of all that was ever produced, without what was applied and what is left."""
    found = {}
    for name, parameter in wrapped.module.named_parameters():
        left = state["residuals"]["values"][name] / state["residuals"]["scale"]
        total = torch.stack([produced[name], left])
        dist.all_reduce(total)
        assert total[1].any(), "nothing is left, so nothing is shown"
        found[name] = (total[0] - total[1] + group.size() * parameter).abs().sum().item()
    return found


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, inputs):
        return self.first(inputs) + self.second(2 * inputs)


def two_optimizers(group, set_to_none):
    """The second layer's takes a step only every other time, and its gradients are dropped then."""
    model = Both()
    wrapped = DistributedDataParallel(model, compression=GTopK(density=0.1, whole_model=True))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model.children()]
    produced = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for step in range(6):
        model.zero_grad(set_to_none=set_to_none)
        inputs = whole_numbers(step, group.rank())
        wrapped(inputs).sum().backward()
        produced["first.weight"] += inputs
        optimizers[0].step()
        if step % 2 == 0:
            optimizers[1].step()
            produced["second.weight"] += 2 * inputs
    model.zero_grad(set_to_none=set_to_none)
    return missing(group, wrapped, wrapped.sparse_state_dict(), produced)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_each_optimizer_discards_its_own(tmp_path, set_to_none):
    results = on_processes(2, two_optimizers, set_to_none, scratch=tmp_path)
    assert results == [{"first.weight": 0.0, "second.weight": 0.0}] * 2


def uneven(group, is_scaled, set_to_none, last):
    """Rank 1 goes on alone, and discards every other pass then, and the ``last``."""
    model = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if is_scaled else None
    wrapped = DistributedDataParallel(
        model, compression=GTopK(density=0.1, whole_model=True), grad_scaler=scaler
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    produced = torch.zeros(1, NUMEL)
    with wrapped.join():
        for step in range(2 + (last - 1) * group.rank()):
            optimizer.zero_grad(set_to_none=set_to_none)
            inputs = whole_numbers(step, group.rank())
            loss = wrapped(inputs).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step % 2:
                continue
            produced += inputs
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
    return missing(group, wrapped, wrapped.sparse_state_dict(), {"weight": produced})


@pytest.mark.parametrize(
    ("is_scaled", "set_to_none", "last"),
    [(False, True, 4), (False, False, 5), (True, True, 5), (True, False, 4)],
)
def test_a_rank_without_data_follows_who_discards(tmp_path, is_scaled, set_to_none, last):
    results = on_processes(2, uneven, is_scaled, set_to_none, last, scratch=tmp_path)
    assert results == [{"weight": 0.0}] * 2


def differing(group, is_scaled):
    """Rank 0 alone discards."""
    model = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_scaled)
    wrapped = DistributedDataParallel(
        model,
        compression=GTopK(density=0.1, whole_model=True),
        grad_scaler=scaler if is_scaled else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(wrapped(whole_numbers(step, group.rank())).sum()).backward()
        if group.rank() or step % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
    return wrapped.sparse_state_dict()["step"]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_ranks_that_differ_do_not_wait_for_each_other(tmp_path, is_scaled):
    assert on_processes(2, differing, is_scaled, scratch=tmp_path) == [4, 4]

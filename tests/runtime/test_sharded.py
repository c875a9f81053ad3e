"""Sharded data parallelism trains as one worker does on everybody's batch."""

import time
from collections import OrderedDict

import pytest
import torch
from ranks import on_processes, seeded
from sharded_training import (
    BACKWARD_ONLY,
    MADE,
    OPTIMIZERS,
    TENSORS,
    alone,
    assert_same,
    batches,
    on_ranks,
    plan,
    sharded,
    small,
)
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.comm.communicator import Communicator
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.workloads.datasets import Batches, fashion_mnist_subset
from gradweave._src.workloads.models import SmallCNN


def trained(group, twins, make_model, make_optimizer, options):
    model = sharded(group, twins, make_model(), **options)
    optimizer = make_optimizer(model.parameters())
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("given", [MADE, BACKWARD_ONLY], ids=["both", "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_one_worker(world, given, name):
    make = OPTIMIZERS[name]
    expected = alone(model := small(), make(model.parameters()), batches(world))
    for state in on_ranks(world, trained, small, make, {"plan": given}):
        assert_same(state, expected)


@pytest.mark.parametrize("collective", ["native", "halving-doubling"])
def test_other_collectives(collective):
    given = plan(*TENSORS, collective=collective)
    expected = alone(model := small(), OPTIMIZERS["adam"](model.parameters()), batches(3))
    arguments = (small, OPTIMIZERS["adam"], {"plan": given})
    for state in on_ranks(3, trained, *arguments):
        assert_same(state, expected)


class Attentive(nn.Module):
    """Reads parameters of modules that it does not call, one of them tied, one of them unused."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, batch):
        batch = self.inner(batch)
        batch, _ = self.attention(batch, batch, batch, need_weights=False)
        return self.tied(batch) * self.scale


def attentive():
    return seeded(lambda: Attentive().double())


def test_parameters_that_others_read():
    """Each in a bucket of its own, so that every one must be waited for."""
    make = OPTIMIZERS["sgd"]  # weight decay would shrink the unused ones: their gradients are zero
    expected = alone(model := attentive(), make(model.parameters()), batches(3))
    names = [name for name, _ in attentive().named_parameters()]
    options = {"plan": plan(*((name,) for name in reversed(names)))}
    for state in on_ranks(3, trained, attentive, make, options):
        assert_same(state, expected)


def accumulated(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches(group.size()):
        own = step[group.rank()].chunk(3)
        with model.no_sync():
            for part in own[:-1]:
                (model(part) ** 2).mean().div(3).backward()
        (model(own[-1]) ** 2).mean().div(3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_accumulating_gradients():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    for state in on_ranks(2, accumulated):
        assert_same(state, expected)


def not_zeroed(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    for part in batches(group.size())[0][group.rank()].chunk(3):
        (model(part) ** 2).mean().div(3).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


def test_gradients_add_up_until_they_are_zeroed():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2)[:1])
    for state in on_ranks(2, not_zeroed):
        assert_same(state, expected)


def clipped(group, twins, norm_type, given):
    model = sharded(group, twins, small(), plan=given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        norms.append(float(model.clip_grad_norm_(0.05, norm_type)))
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize("given", [MADE, BACKWARD_ONLY], ids=["both", "backward"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_the_norm_of_all(norm_type, given):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in batches(3):
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)))
        optimizer.step()
    for found, state in on_ranks(3, clipped, norm_type, given):
        assert found == pytest.approx(norms, rel=1e-9)
        assert_same(state, model.state_dict())


def two_optimizers(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    named = dict(model.named_parameters())
    weights = torch.optim.AdamW([p for n, p in named.items() if "weight" in n], lr=1e-3)
    biases = torch.optim.SGD([p for n, p in named.items() if "bias" in n], lr=0.1)
    for step in batches(group.size()):
        (model(step[group.rank()]) ** 2).mean().backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_groups_by_name_and_two_optimizers():
    model = small()
    weights = torch.optim.AdamW([model[0].weight, model[2].weight], lr=1e-3)
    biases = torch.optim.SGD([model[0].bias, model[2].bias], lr=0.1)
    for step in batches(2):
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
    for state in on_ranks(2, two_optimizers):
        assert_same(state, model.state_dict())


def scaled(group, twins):
    """One rank's gradient overflows once; everyone skips that step."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=16.0, process_group=group)
    weights = []
    for number, step in enumerate(batches(group.size())):
        optimizer.zero_grad()
        loss = (model(step[group.rank()]) ** 2).mean()
        if number == 2 and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return weights


def test_a_step_that_overflows_is_skipped_by_all():
    results = on_ranks(2, scaled)
    for weights in results:
        for name, value in weights[1].items():
            assert torch.equal(weights[2][name], value)
        assert not torch.equal(weights[3]["module.0.weight"], weights[2]["module.0.weight"])
        for name, value in results[0][-1].items():
            assert torch.equal(weights[-1][name], value)


def normalised(group, twins):
    names = ("1.bias", "1.weight", "0.bias", "0.weight")
    made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model = sharded(group, twins, made, plan=plan(names))
    with torch.no_grad():
        model.module[1].running_mean.fill_(group.rank() + 1.0)
    model(torch.ones(5, 6))
    return model.module[1].running_mean.clone(), int(model.module[1].num_batches_tracked)


def test_buffers_are_rank_0s():
    first, second = on_ranks(2, normalised)
    assert first[1] == second[1] == 1
    # Both have taken rank 0's, and then a step of their own from there.
    assert torch.allclose(first[0], second[0])


def several_kinds(group, twins):
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3).double()))
    model.b.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    model.a.bias.requires_grad = False
    given = plan(("b.bias", "b.weight", "a.weight"))
    wrapped = sharded(group, twins, model, plan=given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return wrapped.state_dict(), sum(p.numel() for p in wrapped.parameters())


def test_types_may_differ_and_parameters_be_frozen():
    (first, own), (second, others) = on_ranks(2, several_kinds)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert own + others == 3 * 3 + 3 * 3 + 3 + 2 * 3  # the frozen bias is with everyone


def stepped_twice(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        optimizer.step()
    return model.state_dict()


def test_a_second_update_is_sent_too(monkeypatch):
    """And its messages do not travel beside those of the first, which nobody has waited for."""
    busy, twice, run = [], [], Communicator.run

    def slowly(self, operation, message, **options):
        where = message.data_ptr()
        twice.extend([where] if where in busy else [])
        busy.append(where)
        time.sleep(0.01 * (message.numel() < 10))
        run(self, operation, message, **options)
        busy.remove(where)

    monkeypatch.setattr(Communicator, "run", slowly)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in batches(2):
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        optimizer.step()
        optimizer.step()
    for state in on_ranks(2, stepped_twice):
        assert_same(state, model.state_dict())
    assert twice == []


def forgotten(group, twins, how):
    """Rank 0 has a batch too many, whose gradients it does not want any more."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches(group.size()):
        if group.rank() == 0:
            with model.no_sync():
                (model(torch.full((2, 6), torch.inf, dtype=torch.float64)) ** 2).mean().backward()
        parts = step[group.rank()].chunk(3)
        loss = (model(parts[0]) ** 2).mean().div(3)
        ZEROED[how](model, optimizer)
        with model.no_sync():
            (model(parts[1]) ** 2).mean().div(3).backward()
        (model(parts[2]) ** 2).mean().div(3).add(loss).backward()
        optimizer.step()
    return model.state_dict()


ZEROED = {
    "by the model": lambda model, _: model.zero_grad(),
    "by the optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "with zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", ZEROED)
def test_zeroing_forgets_what_was_added_up(how):
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    for state in on_ranks(2, forgotten, how):
        assert_same(state, expected)


def frozen_now_and_then(model, wrapped, optimizer, loss_of, everything):
    """A layer in the odd steps, and everything while somebody else's loss goes through it."""
    for number, step in enumerate(everything):
        model[0].requires_grad_(number % 2 == 0)
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
        wrapped.requires_grad_(requires_grad=False)
        inputs = step.clone().requires_grad_()
        loss_of(inputs).backward()
        wrapped.requires_grad_(requires_grad=True)
    return wrapped.state_dict()


def frozen_on_ranks(group, twins, make):
    wrapped = sharded(group, twins, model := small(), plan=MADE)

    def loss_of(step):
        return (wrapped(step[group.rank()]) ** 2).mean()

    optimizer = make(wrapped.parameters())
    return frozen_now_and_then(model, wrapped, optimizer, loss_of, batches(group.size()))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_what_is_frozen_for_a_while_stays_as_it_is(name):
    """Also under momentum and weight decay, and by turns, as adversaries train."""
    model = small()
    expected = frozen_now_and_then(
        model,
        model,
        OPTIMIZERS[name](model.parameters()),
        lambda step: (model(step.flatten(0, 1)) ** 2).mean(),
        batches(2),
    )
    for state in on_ranks(2, frozen_on_ranks, OPTIMIZERS[name]):
        assert_same(state, expected)


REAL_STEPS = 50


def on_real_images(group, kind, make_optimizer):
    images = fashion_mnist_subset(train=True)
    order = Batches(examples=len(images), batch_size=4, world=group.size(), rank=group.rank())
    torch.manual_seed(0)
    model = SmallCNN(width=4).double()
    wrap = TorchDDP if kind == "torch" else ShardedDataParallel
    wrapped = wrap(model) if kind == "torch" else wrap(model, record_steps=1, trial_steps=1)
    optimizer = make_optimizer(wrapped.parameters())
    for step in range(REAL_STEPS):
        batch = images.take(order.indices(step))
        optimizer.zero_grad()
        cross_entropy(wrapped(batch.normalised().double()), batch.labels).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in wrapped.state_dict().items()}


def every_optimizer(group, kind):
    return {name: on_real_images(group, kind, make) for name, make in OPTIMIZERS.items()}


@pytest.mark.long
def test_fifty_steps_on_real_images_as_with_torch(tmp_path):
    """Seconds: processes, with torch's wrapper."""
    world = 3
    for kind in ("torch", "ours"):
        (tmp_path / kind).mkdir()
    expected = on_processes(world, every_optimizer, "torch", scratch=tmp_path / "torch")
    found = on_processes(world, every_optimizer, "ours", scratch=tmp_path / "ours")
    for rank in range(world):
        for name in OPTIMIZERS:
            for key, value in expected[rank][name].items():
                assert found[rank][name][key] == pytest.approx(value, rel=1e-9, abs=1e-12)

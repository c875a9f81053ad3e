"""An optimizer's step, bucket by bucket while others travel, is the step that torch would take."""

import pytest
import torch
from ranks import seeded
from sharded_training import MADE, batches, on_ranks, plan, sharded, small
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from gradweave._src.runtime.flat import engine as flat_engine
from gradweave._src.runtime.flat.elementwise import ELEMENTWISE
from gradweave._src.runtime.flat.engine import FlatEngine
from gradweave._src.step_hooks import update

OPTIMIZERS = {
    **{kind.__name__: lambda p, kind=kind: kind(p, lr=0.01) for kind in ELEMENTWISE},
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def nothing(*_):
    """A hook of the user's, which keeps steps whole."""


def groups_of(model):
    """Two, whose parameters lie in all buckets."""
    named = dict(model.named_parameters())
    weights = [parameter for name, parameter in named.items() if "weight" in name]
    biases = [parameter for name, parameter in named.items() if "bias" in name]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def trained(group, twins, make, hooked_ranks, finish):
    """Weights, and the whole state of the optimizer."""
    model = sharded(group, twins, small(), plan=MADE, updates_by_bucket=True)
    optimizer = make(groups_of(model))
    if group.rank() in hooked_ranks:
        optimizer.register_step_pre_hook(nothing)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=group)
    for step in batches(group.size()):
        optimizer.zero_grad()
        loss = (model(step[group.rank()]) ** 2).mean()
        if finish == "scaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if finish == "clip":
                model.clip_grad_norm_(0.05)
            optimizer.step()
        schedule.step()
    return model.state_dict(), model.optimizer_state_dict(optimizer)


def assert_equal(found, expected):
    """Bit by bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Some of each kind: with and without momentum, with and without a state, one call for many.
IN_SHORT = {"Adagrad", "AdamW", "SGD", "momentum", "foreach", "fused"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.long) for name in OPTIMIZERS],
)
def test_in_parts_as_in_one(name):
    whole, _ = on_ranks(2, trained, OPTIMIZERS[name], {0, 1}, None)
    for parts in on_ranks(2, trained, OPTIMIZERS[name], set(), None):
        assert_equal(parts, whole)


@pytest.mark.parametrize("finish", ["clip", "scaler"])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_with_what_comes_before_a_step(name, finish):
    whole, *_ = on_ranks(3, trained, OPTIMIZERS[name], {0, 1, 2}, finish)
    for parts in on_ranks(3, trained, OPTIMIZERS[name], set(), finish):
        assert_equal(parts, whole)


def test_ranks_need_not_update_alike():
    """A hook on one rank, as for its log: all send the same messages in the same order."""
    whole, *_ = on_ranks(3, trained, OPTIMIZERS["AdamW"], {0, 1, 2}, None)
    for mixed in on_ranks(3, trained, OPTIMIZERS["AdamW"], {1}, None):
        assert_equal(mixed, whole)


def logged(group, twins, make_optimizer, options):
    model = sharded(group, twins, small(), plan=options.get("plan", MADE), updates_by_bucket=True)
    optimizer = make_optimizer(model.parameters())
    (model(batches(group.size())[0][group.rank()]) ** 2).mean().backward()
    optimizer.step(*options.get("arguments", ()))
    return model.state_dict()


@pytest.fixture
def events(monkeypatch):
    """What an engine updates by itself and sends, of one rank alone."""
    log = []

    def noted(optimizer, parameters):
        log.append(f"update {len(parameters)}")
        update(optimizer, parameters)

    submit = FlatEngine._submit

    def submitted(self, operation, number):
        log.extend([f"send {number + 1}"] if operation == "all-gather" else [])
        return submit(self, operation, number)

    monkeypatch.setattr(flat_engine, "update", noted)
    monkeypatch.setattr(FlatEngine, "_submit", submitted)
    # One rank has nobody to send to, and its steps stay whole; it sends the same to itself.
    monkeypatch.setattr(FlatEngine, "_sends_to_others", property(lambda _: True))
    return log


def test_what_forward_needs_first_leaves_before_the_rest_is_updated(events):
    on_ranks(1, logged, OPTIMIZERS["Adam"], {})
    # By the number of parameters: the plan's three buckets have one, two and one.
    assert events == ["update 1", "send 3", "update 2", "send 2", "update 1", "send 1"]


class Counting(torch.optim.SGD):
    """Knows more than a state for each parameter."""


def half_of(parameters):
    return torch.optim.SGD(list(parameters)[:2], lr=0.1)


WHOLE = {
    "a closure": (OPTIMIZERS["SGD"], {"arguments": [lambda: None]}),
    "another class": (lambda p: Counting(p, lr=0.1), {}),
    "one bucket": (
        OPTIMIZERS["SGD"],
        {"plan": plan(("2.bias", "2.weight", "0.bias", "0.weight"))},
    ),
    "some shards": (half_of, {}),
}


@pytest.mark.parametrize("why", WHOLE)
def test_steps_that_stay_whole(events, why, caplog):
    make, options = WHOLE[why]
    on_ranks(1, logged, make, options)
    assert [event for event in events if event.startswith("update")] == []
    assert not caplog.records


def doubled(group, twins, hook_of):
    model = sharded(group, twins, small(), plan=MADE, updates_by_bucket=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook_of(optimizer)
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


def doubling(optimizer):
    def double(*_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    optimizer.register_step_pre_hook(double)


def doubling_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 2


def test_a_hook_may_change_gradients():
    expected, _ = on_ranks(2, doubled, doubling_rate)
    for state in on_ranks(2, doubled, doubling):
        assert_equal(state, expected)


def beside_another(group, twins, is_hooked):
    """One optimizer for a sharded model and a parameter of another."""
    model = sharded(group, twins, small(), plan=MADE, updates_by_bucket=True)
    other = seeded(lambda: nn.Linear(6, 1).double())
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], lr=0.01)
    if is_hooked:
        optimizer.register_step_pre_hook(nothing)
    for step in batches(1):
        optimizer.zero_grad()
        (other(model(step[0])) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict(), other.state_dict()


def test_parameters_of_others_are_updated_once():
    whole, _ = on_ranks(2, beside_another, True)  # noqa: FBT003
    for parts in on_ranks(2, beside_another, False):  # noqa: FBT003
        assert_equal(parts, whole)

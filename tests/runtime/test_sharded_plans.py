"""Plans change while sharded training goes on."""

import gc
import weakref

import pytest
import torch
from ranks import on_processes
from sharded_training import (
    MADE,
    OPTIMIZERS,
    alone,
    assert_same,
    batches,
    on_ranks,
    plan,
    sharded,
    small,
)

from gradweave.runtime.sharded import ShardedDataParallel

OTHER = plan(("2.bias", "2.weight", "0.bias"), ("0.weight",))


def replanned(group, twins, name):
    """Two plans in turn, as planning would; what is known of an element moves with it."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = EVERY[name](model.parameters())
    buckets = []
    for number, step in enumerate(batches(group.size(), 8)):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        model._adopt(MADE if number % 2 else OTHER)
        buckets.append(weakref.ref(model._buckets[0]))
    gc.collect()
    return model.state_dict(), [bucket() is not None for bucket in buckets]


EVERY = {**OPTIMIZERS, "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05)}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad"])
def test_plans_change_under_an_optimizer(name, world):
    expected = alone(model := small(), EVERY[name](model.parameters()), batches(world, 8))
    for state, alive in on_ranks(world, replanned, name):
        assert_same(state, expected)
        assert alive == [False] * 7 + [True]  # old buckets are not kept


REPEATED = batches(2, 20)
MOST_STEPS = 3000


def planned(group, name):
    """Until the plan is settled, and on."""
    model = ShardedDataParallel(small(), record_steps=1, trial_steps=1)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    steps, plans = 0, set()
    while steps < MOST_STEPS and (model.findings().stage != "settled" or steps % 5):
        step = REPEATED[steps % len(REPEATED)]
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        schedule.step()
        plans.add(model.plan)
        steps += 1
    found = model.findings()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return steps, state, len(plans), found.plan == model.plan, found.note, model.explain()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_it_plans_while_it_trains(name, tmp_path):
    """Seconds: processes, and a calibration. Optimizers' state moves from plan to plan."""
    results = on_processes(2, planned, name, scratch=tmp_path)
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    for number in range(results[0][0]):
        alone(model, optimizer, REPEATED[number % len(REPEATED)][None])
        schedule.step()
    for steps, state, plans, is_found, note, explained in results:
        assert steps < MOST_STEPS, explained
        assert plans > 1
        assert is_found, note
        for key, value in model.state_dict().items():
            assert state[f"module.{key}"] == pytest.approx(value.numpy(), rel=1e-9, abs=1e-12)

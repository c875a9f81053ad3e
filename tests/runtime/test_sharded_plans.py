"""The sharded wrapper plans while it trains."""

import pytest
import torch
from ranks import on_processes
from sharded_training import OPTIMIZERS, alone, batches, small

from gradweave._src.runtime.sharded import ShardedDataParallel

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

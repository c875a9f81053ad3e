"""Ranks with the environment that torchrun gives, and what all trainings here have in common."""

import gc
import os
from datetime import timedelta

import torch
from ranks import on_processes
from torch import nn

# So that buckets change: its plan is tried whatever is predicted, and torch's own are several.
QUICK = {"record_steps": 1, "trial_steps": 1, "planner": "single", "bucket_cap_mb": 0.0005}
TORCHS = {"bucket_cap_mb": 0.0005}
MOST_STEPS = 600
# After planning has settled, so that the chosen plan is trained with, too.
STEPS_AFTERWARDS = 6

TIMEOUT = timedelta(seconds=60)  # libraries do things between two messages


def on_two(fn, *args, scratch):
    """``fn(rank, …)`` on two ranks as torchrun starts them; the default group is there."""
    return on_processes(2, _launched, fn, args, scratch=scratch, timeout=TIMEOUT)


def _launched(group, fn, args):
    rank = group.rank()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(group.size()),
        "LOCAL_WORLD_SIZE": str(group.size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody listens there: the group is made
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    try:
        return fn(rank, *args)
    finally:
        gc.collect()  # libraries' objects go round in circles, and wrappers go before their group


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2))


def inputs_of(rank, count):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(rank))

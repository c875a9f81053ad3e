"""A small model, plans for both passes, and its sharded training on a few ranks."""

import torch
from ranks import on_threads, seeded
from torch import nn

from gradweave._src.comm.lanes import LANES
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.sharded import ShardedDataParallel

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
}


def small():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double())


def batches(world, steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(steps, world, 3, 4, 6, generator=generator, dtype=torch.float64)


def plan(*buckets, collective="ring", passes="both"):
    made = tuple(Bucket(tensors=tensors, collective=collective) for tensors in buckets)
    return Plan(planner="made", buckets=made, passes=passes)


TENSORS = (("2.bias",), ("2.weight", "0.bias"), ("0.weight",))
MADE = plan(*TENSORS)
BACKWARD_ONLY = plan(*TENSORS, passes="backward")


def alone(model, optimizer, everything, *, clip=None):
    """One worker with everybody's batches."""
    for step in everything:
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def assert_same(state, expected):
    for name, value in expected.items():
        torch.testing.assert_close(state[f"module.{name}"], value, rtol=1e-9, atol=1e-12)


def on_ranks(world, fn, *args):
    """fn gets a group, and others of the same ranks for the threads that send."""
    return on_threads(world, with_twins, fn, *args, groups=1 + LANES)


def with_twins(group, *rest):
    twins, (fn, *args) = rest[:LANES], rest[LANES:]
    return fn(group, twins, *args)


def sharded(group, twins, model, **options):
    made = iter(twins).__next__
    return ShardedDataParallel(model, process_group=group, make_group=made, **options)

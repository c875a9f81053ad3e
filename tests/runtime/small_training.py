"""A small model, plans for it, and its training on a few ranks."""

import torch
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel

QUICK = {"record_steps": 1, "trial_steps": 1}
MOST_STEPS = 600


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)
    ).to(dtype)


# In backward order: of a layer, torch yields the bias first.
NAMES = ["4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


def plan_of(*lengths, collective="native"):
    left = iter(NAMES)
    buckets = tuple(
        Bucket(tensors=tuple(next(left) for _ in range(length)), collective=collective)
        for length in lengths
    )
    return Plan(planner="made", buckets=buckets)


def batch(step, rank, dtype=torch.float32):
    torch.manual_seed(1000 * step + rank)
    return torch.randn(4, 6, dtype=dtype)


def trained(wrapped, rank, *, steps, until_settled=False, accumulate=1):
    """SGD with momentum and clipping; the weights, as exact numbers."""
    dtype = next(wrapped.parameters()).dtype
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    taken = 0
    while taken < steps or (until_settled and wrapped.findings().stage != "settled"):
        assert taken < MOST_STEPS
        optimizer.zero_grad()
        # torch's static graphs want their first pass to be a synchronised one.
        for micro in range(accumulate - 1 if taken else 0):
            with wrapped.no_sync():
                wrapped(
                    batch(7000 + accumulate * taken + micro, rank, dtype)
                ).square().mean().backward()
        wrapped(batch(taken, rank, dtype)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        taken += 1
    return taken, [parameter.detach().clone() for parameter in wrapped.parameters()]


def same_bits(group, ours, torchs, *, make=network, **training):
    """Both take the same number of steps on the same data; whether their weights are equal."""
    wrapped = DistributedDataParallel(make(), **ours)
    steps, weights = trained(wrapped, group.rank(), **training)
    training = {"accumulate": training.get("accumulate", 1), "steps": steps}
    _, expected = trained(TorchDDP(make(), **torchs), group.rank(), **training)
    return all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def on_two(fn, *args, scratch, world=2):
    return on_processes(world, fn, *args, scratch=scratch)


TORCH_OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}

"""Small trainings on the simulated accelerator, by torch's wrapper and by ours."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel

STEPS = 5
QUICK = {"record_steps": 1, "trial_steps": 1}
MOST_STEPS = 300
# In backward order: of a layer, torch yields the bias first.
NAMES = ["4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


def here(group):
    return torch.device("sim", group.rank())


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)
    ).to(device)


def plan_of(*lengths, collective="native", passes="backward"):
    left = iter(NAMES)
    buckets = tuple(
        Bucket(tensors=tuple(next(left) for _ in range(length)), collective=collective)
        for length in lengths
    )
    return Plan(planner="made", buckets=buckets, passes=passes)


def batches(device, rank, count):
    """Made before any step: to copy them over may let the host wait."""
    torch.manual_seed(rank)
    return list(torch.randn(count, 4, 6).to(device))


def optimizer_of(wrapped, kind="momentum"):
    if kind == "adam":
        return torch.optim.Adam(wrapped.parameters(), lr=0.05)
    return torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)


def take_step(wrapped, optimizer, data, accumulate=1):
    optimizer.zero_grad()
    for micro in data[: accumulate - 1]:
        with wrapped.no_sync():
            wrapped(micro).square().mean().backward()
    wrapped(data[accumulate - 1]).square().mean().backward()
    optimizer.step()


def trained(wrapped, group, *, steps=STEPS, until_settled=False, accumulate=1, kind="momentum"):
    """How many steps were taken, and the weights, on the CPU."""
    optimizer = optimizer_of(wrapped, kind)
    data = batches(here(group), group.rank(), accumulate * 8)
    taken = 0
    while taken < steps or (until_settled and wrapped.findings().stage != "settled"):
        assert taken < MOST_STEPS, wrapped.explain()
        first = accumulate * taken % len(data)
        take_step(wrapped, optimizer, data[first : first + accumulate], accumulate)
        taken += 1
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    return taken, [parameter.detach().cpu() for parameter in wrapped.module.parameters()]


def torchs(group, **training):
    return trained(TorchDDP(network(here(group))), group, **training)[1]


def ours(group, *, options=None, **training):
    wrapped = DistributedDataParallel(network(here(group)), **(options or {}))
    return trained(wrapped, group, **training)


def sharded(group, *, options=None, **training):
    wrapped = ShardedDataParallel(network(here(group)), **(options or {}))
    return trained(wrapped, group, **training)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def close(found, expected):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))

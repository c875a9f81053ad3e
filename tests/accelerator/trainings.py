"""Small trainings on the simulated accelerator, by torch's wrapper and by ours."""

import os
from functools import cache

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.comm.groups import same_ranks
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel

SEEDS = int(os.environ.get("GRADWEAVE_DEVICE_SEEDS", "12"))  # of delays, for what must always hold
SEED_TAKES_S = 10  # at most, where others use the machine
KERNELS_TAKE_S = 2e-5  # with these seeds
STEPS = 3
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


@cache
def spare_groups(group):
    """Groups of the same ranks that wrappers have had: torch keeps what it lists."""
    del group
    return []


def wrapped_by(wrap, group, **options):
    """A wrapped network, with groups of wrappers before it, none of which sends any more."""
    spare = spare_groups(group)
    unused = iter(tuple(spare))

    def make_group():
        made = next(unused, None)
        if made is None:
            made = same_ranks(group)
            spare.append(made)
        return made

    return wrap(network(here(group)), make_group=make_group, **options)


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


def take_step_in_two_passes(wrapped, optimizer, data, *, looks):
    """Both are synchronised after both forward passes; a rank may call the model between them."""
    optimizer.zero_grad()
    with wrapped.no_sync():
        losses = [wrapped(value).square().mean() for value in data]
        for number, loss in enumerate(losses):
            if looks and number == 1:
                wrapped(data[0])
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
            wrapped.reducer.prepare_for_backward([])
            loss.backward()
            wrapped.require_backward_grad_sync = False
    optimizer.step()


def trained(
    wrapped,
    group,
    *,
    steps=STEPS,
    until_settled=False,
    accumulate=1,
    kind="momentum",
    in_two_passes=False,
):
    """How many steps were taken, and the weights, on the CPU."""
    optimizer = optimizer_of(wrapped, kind)
    accumulate = 2 if in_two_passes else accumulate
    data = batches(here(group), group.rank(), accumulate * 8)
    taken = 0
    while taken < steps or (until_settled and wrapped.findings().stage != "settled"):
        assert taken < MOST_STEPS, wrapped.explain()
        first = accumulate * taken % len(data)
        if in_two_passes and taken > 1:  # torch's has its lasting buckets by then
            looks = group.rank() == 1
            take_step_in_two_passes(wrapped, optimizer, data[first : first + 2], looks=looks)
        else:
            take_step(wrapped, optimizer, data[first : first + accumulate], accumulate)
        taken += 1
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    return taken, [parameter.detach().cpu() for parameter in wrapped.module.parameters()]


def torchs(group, **training):
    return trained(TorchDDP(network(here(group))), group, **training)[1]


def ours(group, *, options=None, **training):
    wrapped = wrapped_by(DistributedDataParallel, group, **(options or {}))
    return trained(wrapped, group, **training)


def sharded(group, *, options=None, **training):
    wrapped = wrapped_by(ShardedDataParallel, group, **(options or {}))
    return trained(wrapped, group, **training)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def close(found, expected):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))

"""Memory while plans change: old buckets are given back as new ones come."""

from pathlib import Path

import torch
from accelerator import sim
from accelerator.worlds import on_devices
from torch import nn

from gradweave import Bucket, DistributedDataParallel, Plan, ShardedDataParallel

LAYERS, WIDTH = 8, 128
LAYER_BYTES = 4 * WIDTH * WIDTH
NAMES = [f"{layer}.weight" for layer in reversed(range(LAYERS))]


def model(device):
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def plan_of(length, passes):
    parts = [NAMES[first : first + length] for first in range(0, LAYERS, length)]
    buckets = tuple(Bucket(tensors=tuple(part), collective="native") for part in parts)
    return Plan(planner="made", buckets=buckets, passes=passes)


def step(wrapped, optimizer, device):
    optimizer.zero_grad()
    wrapped(torch.ones(2, WIDTH, device=device)).square().mean().backward()
    optimizer.step()


def extra_while_changing(group, wrap, passes):
    """Bytes beyond what there is before and after, by how many layers the new buckets have."""
    device = torch.device("sim", group.rank())
    wrapped = wrap(model(device), plan=plan_of(2, passes))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    extra = {}
    for length in (4, 1, 2):
        step(wrapped, optimizer, device)
        torch.accelerator.synchronize()
        before = sim.memory_allocated(device)
        sim.reset_peak_memory_stats(device)
        wrapped._engine.install(plan_of(length, passes))
        torch.accelerator.synchronize()
        most = sim.max_memory_allocated(device)
        extra[length] = most - max(before, sim.memory_allocated(device))
    step(wrapped, optimizer, device)
    return extra


def test_other_shards_take_one_bucket_more_for_a_while(tmp_path: Path):
    """And this rank's share of the gradients, which are kept for whoever looks at them."""
    found = on_devices(2, extra_while_changing, ShardedDataParallel, "both", scratch=tmp_path)
    for extra in found:
        for length, nbytes in extra.items():
            largest = max(length, 4) * LAYER_BYTES
            share = LAYERS * LAYER_BYTES // 2
            assert nbytes <= largest + share + LAYER_BYTES, (length, nbytes / LAYER_BYTES)


def test_other_buckets_of_torchs_reducer_take_nothing_more(tmp_path: Path):
    found = on_devices(
        2, extra_while_changing, DistributedDataParallel, "backward", scratch=tmp_path
    )
    for extra in found:
        for length, nbytes in extra.items():
            assert nbytes <= length * LAYER_BYTES, (length, nbytes / LAYER_BYTES)

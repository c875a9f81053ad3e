"""channels_last stays in flat buckets, through changes of plans, and weights are torch's."""

from pathlib import Path

import pytest
import torch
from accelerator.worlds import on_devices
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import Bucket, Plan, ShardedDataParallel

NAMES = ["3.bias", "3.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
IMAGE = (2, 4, 4, 4)


def model(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(32, 2)]
    return nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)


def plan_of(*lengths):
    left = iter(NAMES)
    parts = [tuple(next(left) for _ in range(length)) for length in lengths]
    buckets = tuple(Bucket(tensors=part, collective="native") for part in parts)
    return Plan(planner="made", buckets=buckets, passes="both")


def trained(wrapped, device, rank, between=lambda: None):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(IMAGE, generator=generator).to(device)
        inputs = inputs.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        if step == 1:
            between()
    return {name: value.cpu() for name, value in wrapped.state_dict().items()}


def compared(group, kind):
    device = torch.device(kind, group.rank()) if kind == "sim" else torch.device(kind)
    ours = ShardedDataParallel(model(device), plan=plan_of(2, 3, 1))
    found = trained(ours, device, group.rank(), lambda: ours._engine.install(plan_of(1, 5)))
    for name in ("0.weight", "1.weight"):
        parameter = dict(ours.module.named_parameters())[name]
        assert parameter.stride() == dict(model("cpu").named_parameters())[name].stride(), name
    expected = trained(TorchDDP(model(device)), device, group.rank())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_strides_stay_and_weights_are_torchs(kind, tmp_path: Path):
    on_devices(2, compared, kind, scratch=tmp_path)

"""torch's own DistributedDataParallel on the device, against itself on the CPU."""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerator import sim
from accelerator.worlds import on_devices
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEEDS = 50
STEPS = 3


def test_weights_equal_those_of_the_cpu_whatever_the_delays(tmp_path: Path) -> None:
    on_devices(2, compare_with_cpu, scratch=tmp_path)


def compare_with_cpu(group: dist.ProcessGroup) -> None:
    expected = trained(torch.device("cpu"), group.rank())
    for seed in range(SEEDS):
        sim.set_delays(1e-4, seed=seed * group.size() + group.rank())
        found = trained(torch.device("sim", group.rank()), group.rank())
        assert all(map(torch.equal, found, expected)), f"seed {seed}"
        assert sim.hazards(strict=True) == [], f"seed {seed}"


def trained(device: torch.device, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers).double().to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        batch = torch.randn(5, 8, generator=batches, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]

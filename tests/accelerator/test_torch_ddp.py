"""torch's own DistributedDataParallel on the device, against itself on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerator import sim
from accelerator.worlds import on_devices
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 4

Wrap = Callable[[nn.Module], DistributedDataParallel]


def small_buckets(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.001)


def views(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def hooked(model: nn.Module) -> DistributedDataParallel:
    """The hook divides first and multiplies in a callback of the future, on another stream."""
    wrapped = small_buckets(model)
    wrapped.register_comm_hook(None, halved_and_doubled)
    return wrapped


def halved_and_doubled(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().div_(2)
    future = default_hooks.allreduce_hook(dist.group.WORLD, bucket)
    return future.then(lambda reduced: reduced.value().mul(2))


@pytest.mark.parametrize(
    ("wrap", "seeds"),
    [
        # In halves, since ranks that have not answered for two minutes are taken for dead.
        (small_buckets, range(25)),
        (small_buckets, range(25, 50)),
        (views, range(10)),
        (hooked, range(10)),
    ],
)
def test_weights_equal_those_of_the_cpu_whatever_the_delays(
    wrap: Wrap, seeds: range, tmp_path: Path
) -> None:
    on_devices(2, compare_with_cpu, wrap, seeds, scratch=tmp_path)


def compare_with_cpu(group: dist.ProcessGroup, wrap: Wrap, seeds: range) -> None:
    expected = trained(wrap, torch.device("cpu"), group.rank())
    for seed in seeds:
        sim.set_delays(1e-4, seed=seed * group.size() + group.rank())
        found = trained(wrap, torch.device("sim", group.rank()), group.rank())
        assert all(map(torch.equal, found, expected)), f"seed {seed}"
        assert sim.hazards(strict=True) == [], f"seed {seed}"


def trained(wrap: Wrap, device: torch.device, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers).double().to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = torch.randn(5, 8, generator=batches, dtype=torch.float64).pin_memory()
        if step == STEPS - 2:
            # By now torch has arranged its buckets anew, for which it waits.
            waited = sim.counters().host_waits
        optimizer.zero_grad()
        wrapped(batch.to(device, non_blocking=True)).square().mean().backward()
        optimizer.step()
    # In its first ten steps torch asks its timer how long the last one took, and waits for that.
    assert set(sim.counters().host_waits - waited) <= {"DDP's timer"}
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_both_passes_may_have_streams_of_their_own() -> None:
    sim.set_device(0)
    sim.reset()
    sim.set_delays(1e-4)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("sim")
    batch = torch.randn(5, 8, device="sim")
    model(batch).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    side = torch.Stream(device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = model(batch).sum()
    loss.backward()  # autograd goes back on the side stream, and the current one waits for it
    found = [parameter.grad * 1 for parameter in model.parameters()]
    assert sim.hazards() == []
    assert all(map(torch.equal, found, expected))

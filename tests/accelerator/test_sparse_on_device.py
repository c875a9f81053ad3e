"""Sparsified gradients on the device: the same bits as on the CPU, and little that crosses."""

from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from accelerator import sim
from accelerator.trainings import KERNELS_TAKE_S, SEED_TAKES_S, SEEDS
from accelerator.worlds import on_devices
from torch import nn

from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse import threshold
from gradweave._src.sparse.residual import Flat
from gradweave._src.sparse.select import select
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.vectors import elements_kept, message_bytes

HOST = torch.device("cpu")
SIM = torch.device("sim")
MILLION = 1 << 20


def selected(gradient, k, *, method="threshold"):
    flat = Flat((), torch.zeros_like(gradient), torch.zeros_like(gradient))
    chosen = select(flat, gradient, k=k, method=method)
    return chosen, flat.pending.cpu()


def assert_same(found, expected):
    (chosen, left), (should, should_be_left) = found, expected
    assert chosen.finite == should.finite
    assert chosen.indices.tobytes() == should.indices.tobytes()
    assert chosen.values.tobytes() == should.values.tobytes()
    assert left.numpy().tobytes() == should_be_left.numpy().tobytes()


@pytest.mark.parametrize("numel", [1000, threshold.SAMPLE + 5, 200_003])
@pytest.mark.parametrize("density", [0.001, 0.3])
@pytest.mark.parametrize("kind", ["normal", "few levels", "zeros"])
def test_the_same_elements_as_on_the_cpu(numel, density, kind):
    generator = torch.Generator().manual_seed(numel)
    gradient = torch.randn(numel, generator=generator)
    gradient = {"normal": gradient, "few levels": gradient.round(), "zeros": gradient * 0}[kind]
    k = elements_kept(numel, density)
    expected = selected(gradient, k, method="radix")
    there = gradient.to(SIM)
    assert_same(selected(there, k), expected)
    assert sim.hazards() == []


def test_what_is_not_finite_is_told_without_another_copy():
    gradient = torch.ones(100_000, device=SIM)
    gradient[77] = torch.nan
    sim.reset()
    flat = Flat((), torch.zeros_like(gradient), torch.zeros_like(gradient))
    assert not select(flat, gradient, k=100, method="threshold").finite
    assert sim.counters().host_wait_count == 1


def cost(numel, density, method="threshold"):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(SIM)
    flat = Flat((), torch.zeros_like(gradient), torch.zeros_like(gradient))
    torch.accelerator.synchronize()
    sim.reset()
    select(flat, gradient, k=elements_kept(numel, density), method=method)
    return sim.counters()


def test_one_wait_and_only_the_chosen_cross_to_the_host():
    """The figures of docs/accelerators.md."""
    k = elements_kept(MILLION, 0.001)
    counted = cost(MILLION, 0.001)
    assert counted.host_wait_count == 1
    assert counted.bytes_to_host <= message_bytes(k, np.float32, np.int32)
    assert counted.bytes_to_device == 0
    assert counted.launches.total() <= 40
    assert not {name for name in counted.launches if "topk" in name}


def test_a_floor_that_is_missed_costs_one_more_message(monkeypatch):
    monkeypatch.setattr(threshold, "LEAST_SAMPLED_ABOVE", 1)
    monkeypatch.setattr(threshold, "CANDIDATES_PER_CHOSEN", 0.01)
    gradient = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    expected = selected(gradient, 500, method="radix")
    there = gradient.to(SIM)
    sim.reset()
    flat = Flat((), torch.zeros_like(there), torch.zeros_like(there))
    chosen = select(flat, there, k=500, method="threshold")
    assert sim.counters().host_wait_count == 2
    assert_same((chosen, flat.pending.cpu()), expected)


# --- Trainings ---------------------------------------------------------------------------------


def whole_numbers(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (4, 24), generator=generator).float()


def trained(device, group, settings, *, steps=6, seed=0, scaler=None):
    """Gradients are whole numbers: sums are exact in any order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 3))
    for parameter in model.parameters():
        parameter.data = parameter.data.mul(8).round()
    model = model.to(device)
    wrapped = DistributedDataParallel(
        model, compression=settings, grad_scaler=scaler, bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    applied = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    produced = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for step in range(steps):
        inputs = whole_numbers(step + 1000 * seed, group.rank()).to(device)
        local = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
        for total, one in zip(produced.values(), local, strict=True):
            total.add_(one)
        optimizer.zero_grad()
        loss = wrapped(inputs).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for total, one in zip(applied.values(), model.parameters(), strict=True):
            total.add_(one.grad)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    state = wrapped.sparse_state_dict()
    kept = {name: one.cpu() for name, one in state["residuals"]["values"].items()}
    return tuple({n: t.cpu() for n, t in of.items()} for of in (produced, applied, kept))


SETTINGS = {
    "gtopk": GTopK(0.02),
    "topk": TopK(0.02),
    "small ones whole": GTopK(0.02, dense_below=50),
    "momentum and clipping": GTopK(0.02, momentum=0.5, clip_norm=1e6, dense_below=50),
}


def conserved(group, name):
    device = torch.device("sim", group.rank())
    settings = SETTINGS[name]
    produced, applied, kept = trained(device, group, settings)
    for found, expected in zip((applied, kept), trained(HOST, group, settings)[1:], strict=True):
        for parameter in found:
            assert torch.equal(found[parameter], expected[parameter]), parameter
    if settings.momentum is not None:
        return
    for parameter in produced:
        total = torch.stack([produced[parameter], kept[parameter]])
        dist.all_reduce(total, group=group)
        assert torch.equal(total[0], total[1] + group.size() * applied[parameter]), parameter


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_lost_and_bits_are_those_of_the_cpu(name, tmp_path: Path):
    on_devices(2, conserved, name, scratch=tmp_path)


def same_with_any_delays(group, seeds):
    device = torch.device("sim", group.rank())
    for seed in seeds:
        sim.set_delays(KERNELS_TAKE_S, seed=seed * group.size() + group.rank())
        found = trained(device, group, SETTINGS["small ones whole"], steps=3, seed=seed)
        expected = trained(HOST, group, SETTINGS["small ones whole"], steps=3, seed=seed)
        for mine, should in zip(found, expected, strict=True):
            assert all(torch.equal(mine[name], should[name]) for name in mine), f"seed {seed}"
        assert sim.hazards() == [], f"seed {seed}"


# torch lists the groups that wrappers plan with for ever, and the device compares what all have
# launched, which has to fit into a message.
SEEDS_AT_ONCE = 25


def test_bits_do_not_depend_on_delays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_S", ranks.MOST_S + SEED_TAKES_S * SEEDS_AT_ONCE)
    for first in range(0, SEEDS, SEEDS_AT_ONCE):
        seeds = range(SEEDS)[first : first + SEEDS_AT_ONCE]
        folder = tmp_path / str(first)
        folder.mkdir()
        on_devices(2, same_with_any_delays, seeds, scratch=folder)


def with_scaler(group):
    device = torch.device("sim", group.rank())
    scaler = torch.amp.GradScaler("sim", init_scale=2.0**10, growth_interval=2)
    of_host = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = trained(device, group, GTopK(0.02), scaler=scaler)
    expected = trained(HOST, group, GTopK(0.02), scaler=of_host)
    for mine, should in zip(found[1:], expected[1:], strict=True):
        assert all(torch.equal(mine[name], should[name]) for name in mine)


def test_residuals_follow_a_scaler_that_is_on_the_device(tmp_path: Path):
    on_devices(2, with_scaler, scratch=tmp_path)


def waits_of_the_main_thread(group):
    """Where waits of the host come from that are not of the thread that sends."""
    device = torch.device("sim", group.rank())
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 3)).to(device)
    wrapped = DistributedDataParallel(
        model, compression=GTopK(0.02, dense_below=50, whole_model=True)
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    inputs = [whole_numbers(step, group.rank()).to(device) for step in range(10)]

    def step(one):
        optimizer.zero_grad()
        wrapped(one).square().mean().backward()
        optimizer.step()

    for one in inputs[:4]:
        step(one)
    torch.accelerator.synchronize()
    sim.reset()
    sim.trace_host_waits()
    for one in inputs[4:]:
        step(one)
    stacks = sim.host_wait_stacks()
    sim.trace_host_waits(trace=False)
    assert any("worker.py" in stack for _, stack in stacks), "what is sent has been waited for"
    # torch's wrapper reads its own timers now and then, also without us.
    torchs = "in _pre_forward\n    self.logger.set_runtime_stats_and_log()"
    return [stack for _, stack in stacks if "worker.py" not in stack and torchs not in stack]


def test_only_the_thread_that_sends_waits(tmp_path: Path):
    for stacks in on_devices(2, waits_of_the_main_thread, scratch=tmp_path):
        assert stacks == []

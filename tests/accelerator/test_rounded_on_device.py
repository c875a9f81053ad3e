"""Messages that are rounded on the device: the CPU's bits, and no waits of the host."""

import ranks
import torch
from accelerator import sim
from accelerator.test_runtime_on_device import waits_of_steps
from accelerator.trainings import (
    KERNELS_TAKE_S,
    MOST_STEPS,
    QUICK,
    SEED_TAKES_S,
    SEEDS,
    network,
    plan_of,
)
from accelerator.worlds import on_devices
from msgspec.structs import replace
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.compression import Compression
from gradweave._src.plan import Plan
from gradweave._src.runtime.ddp import DistributedDataParallel

HOST = torch.device("cpu")
FORMATS = ("bf16", "fp16", "int8")
STEPS = 6


def rounded_plan(method):
    """One message as it is, by the backend; then one that is rounded."""
    exact, rounded = plan_of(2, 3).buckets
    rounded = replace(rounded, collective="ring", compression=Compression(method=method))
    return Plan(planner="made", buckets=(exact, rounded))


def trained(device, group, options, *, until_settled=False):
    """The weights after some steps, and what rounding has dropped so far."""
    wrapped = DistributedDataParallel(network(device), **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    step = 0
    while step < STEPS or (until_settled and wrapped.findings().stage != "settled"):
        assert step < MOST_STEPS, wrapped.explain()
        generator = torch.Generator().manual_seed(100 * step + group.rank())
        inputs = torch.randn(4, 6, generator=generator).to(device)
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        step += 1
    carried = wrapped._engine._transports._carried._of_parameter
    weights = {name: one.detach() for name, one in wrapped.module.named_parameters()}
    bits = [{name: one.cpu().tolist() for name, one in of.items()} for of in (weights, carried)]
    plans = [trial.candidate.plan for trial in wrapped.findings().trials]
    tried = {bucket.compression for plan in plans for bucket in plan.buckets} - {None}
    return (*bits, {compression.method for compression in tried})


def on_both(group, seeds):
    """The CPU's bits, and with which seeds and formats the device has others, or a hazard."""
    device, wrong = torch.device("sim", group.rank()), []
    expected = {
        method: trained(HOST, group, {"precision": "rounded", "plan": rounded_plan(method)})
        for method in FORMATS
    }
    exact = trained(HOST, group, {"plan": plan_of(2, 3)})
    assert exact[0] not in [weights for weights, *_ in expected.values()], "all are rounded"
    assert expected["int8"][1], "something is carried over"
    for seed in range(seeds):
        sim.set_delays(KERNELS_TAKE_S, seed=1000 * seed + group.rank())
        sim.reset()
        method = FORMATS[seed % len(FORMATS)]
        options = {"precision": "rounded", "plan": rounded_plan(method)}
        found = trained(device, group, options)
        torch.accelerator.synchronize()
        if found != expected[method] or sim.hazards() or sim.errors():
            wrong.append((seed, method, sim.hazards()[:3], sim.errors()[:3]))
    sim.reset()
    return expected, wrong


def test_the_same_bits_as_on_the_cpu_with_any_delays(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_S", ranks.MOST_S + SEED_TAKES_S * SEEDS)
    found = on_devices(2, on_both, SEEDS, scratch=tmp_path)
    assert [wrong for _, wrong in found] == [[], []]
    ours, others = (expected for expected, _ in found)
    for method in FORMATS:
        assert ours[method][0] == others[method][0], f"ranks have other weights with {method}"
        assert ours[method][0] != ours["int8" if method != "int8" else "bf16"][0]


def settled(group):
    """Ranks' weights after planning, whether plans may round or must."""
    device = torch.device("sim", group.rank())
    return {
        precision: trained(device, group, {"precision": precision, **QUICK}, until_settled=True)
        for precision in ("rounded", "bf16", "int8")
    }


def test_ranks_that_plan_end_with_the_same_bits(tmp_path):
    ours, others = on_devices(2, settled, scratch=tmp_path)
    for precision, (weights, _, tried) in ours.items():
        assert weights == others[precision][0]
        assert precision == "rounded" or tried == {precision}


def waits(group):
    device = torch.device("sim", group.rank())
    found = {"torch": waits_of_steps(TorchDDP(network(device)), group)}
    for method in FORMATS:
        options = {"precision": "rounded", "plan": rounded_plan(method)}
        wrapped = DistributedDataParallel(network(device), **options)
        found[method] = waits_of_steps(wrapped, group)
    return found


def test_no_host_waits_because_of_rounding(tmp_path):
    for found in on_devices(2, waits, scratch=tmp_path):
        more = {name: sum(of.values()) - sum(found["torch"].values()) for name, of in found.items()}
        assert set(more.values()) == {0}, found

"""What measures, on a device that does everything later than asked for; one launch for all."""

import time
import traceback
from itertools import pairwise
from threading import Thread
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerator import sim, trainings
from accelerator.probing import Prober
from accelerator.trainings import QUICK, close, here
from accelerator.worlds import on_devices

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src.clocks import DeviceClock
from gradweave._src.collectives.topology import Topology
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.small_messages import for_texts, payload_device
from gradweave._src.measure.collectives import time_collectives
from gradweave._src.measure.network import measure_network
from gradweave._src.runtime.driving.activities import StepTiming
from gradweave._src.runtime.reporting import captures
from gradweave._src.session.commands import TimeSteps
from gradweave._src.vocabulary import Way

ALL_REDUCES = (Way("all-reduce", "native"), Way("all-reduce", "ring"))
HALVES = (Way("reduce-scatter", "ring"), Way("all-gather", "native"))


def steps_take_what_kernels_take(group):
    """A host that is ahead by a step and more still times steps of the device."""
    device, clock = here(group), DeviceClock(here(group))
    sim.set_delays(6e-3, jitter=0.5, seed=5)
    sim.keep_kernels()
    tensor = torch.zeros(8, device=device)
    timing = StepTiming(TimeSteps(steps=6, settling_steps=0), clock, None)
    for _ in range(6):
        for _ in range(10):
            tensor.add_(1.0)
        timing.step_over()
        timing.part()  # looks, and waits for nothing
    asked_ns = time.monotonic_ns()
    assert sim.counters().host_wait_count == 0
    torch.accelerator.synchronize()
    ends_ns = [kernel.end_ns for kernel in sim.kernels()[-60:]][9::10]
    true_s = [(end - begin) / 1e9 for begin, end in pairwise(ends_ns)]
    found_s = timing.part().steps_s
    sim.keep_kernels(keep=False)
    assert asked_ns < ends_ns[-2]  # so much the host was ahead
    errors = sorted(abs(f / t - 1) for f, t in zip(found_s[1:], true_s, strict=True))
    assert errors[len(errors) // 2] < 0.02, errors


def probes(group):
    """The same messages after the same passes on all ranks, and no host waits for one of them."""
    for ways in (ALL_REDUCES, HALVES):
        prober = Prober(group)
        part, early = prober.probe(ways)
        prober.close()
        assert part is not None
        assert early == []
        if group.rank() == 0:
            sizes = {sample.sizes_bytes for sample in part.samples}
            assert {(1024,), (4096,)} <= sizes, sizes
            assert {sample.collective for sample in part.samples} == {w.collective for w in ways}
            assert all(sample.taken_s > 0 for sample in part.samples)
        assert "device.synchronize" not in sim.counters().host_waits


def calibrated_beside_a_training(group):
    """On a thread, which has another current device: on the device that is meant, apart from it."""
    found, device = [], here(group)
    default = sim.stream_number(torch.accelerator.current_stream(device))
    own = OwnGroup(group, None)
    sim.keep_kernels()

    def run():
        network = measure_network(
            own.group,
            name="sim",
            ways=ALL_REDUCES,
            largest_bytes=8 * 1024,
            repeats=1,
            device=device,
            communicator=Communicator(own.group, topology=own.topology),
        )
        found.append(network)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    ran = sim.kernels()
    waits = sim.counters().host_waits
    sim.keep_kernels(keep=False)
    own.close()
    assert found
    assert ran
    assert {kernel.device for kernel in ran} == {device.index}
    assert default not in {kernel.stream for kernel in ran}
    assert "device.synchronize" not in waits


def collectives_are_timed(group):
    sim.set_delays(2e-3, seed=group.rank())
    alone = dist.new_group(backend="sim:simccl")
    assert payload_device(alone) == here(group)
    (timing,) = time_collectives(
        Communicator(alone), operation="all-reduce", algorithms=["ring"], nbytes=64, repeats=1
    )
    assert timing.correct
    assert timing.median_s > 2e-3  # a ring adds and sends; launching takes no time
    tiered = Communicator(group, topology=Topology(order=(0, 1), factors=(2,)))
    message = torch.ones(64, device=here(group))
    tiered.run("all-reduce", message, collective="blueconnect:auto")
    assert torch.equal(message.cpu(), torch.full((64,), 2.0))


def a_group_of_the_accelerator_alone_has_another_for_texts(group):
    alone = dist.new_group(backend="sim:simccl")
    assert for_texts(group) is group
    assert for_texts(alone) is not alone
    options = {**QUICK, "process_group": alone}
    for train in (trainings.ours, trainings.sharded):
        steps, found = train(group, options=options, until_settled=True)
        assert close(found, trainings.torchs(group, steps=steps))


def ranks_far_ahead_hear_what_is_announced(group):
    """Rank 0's host is late in every step, and rank 1's queues steps meanwhile."""
    device = here(group)
    for wrap in (DistributedDataParallel, ShardedDataParallel):
        model = trainings.network(device)
        if group.rank() == 0:
            model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
        wrapped = wrap(model, **QUICK)
        steps, found = trainings.trained(wrapped, group, until_settled=True)
        assert close(found, trainings.torchs(group, steps=steps)), wrap
        counts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(counts, torch.tensor([float(steps)]))
        assert counts[0] == counts[1]


def captured(group):
    """While a graph is captured nothing is timed and nobody plans, and one line says so."""
    wrapped = DistributedDataParallel(trainings.network(here(group)), **QUICK)
    (data,) = trainings.batches(here(group), group.rank(), 1)
    optimizer = trainings.optimizer_of(wrapped)
    for _ in range(3):
        trainings.take_step(wrapped, optimizer, [data])
    clock_steps, before = wrapped._clock.steps, wrapped.findings()
    told = []
    with (
        patch.object(sim, "is_current_stream_capturing", lambda: True, create=True),
        patch.object(captures.logger, "warning", told.append),
    ):
        for _ in range(8):
            trainings.take_step(wrapped, optimizer, [data])
    assert [line.startswith("a graph is captured") for line in told] == [True]
    assert wrapped._clock.steps == clock_steps
    assert wrapped.findings().steps == before.steps


LAWS = (
    steps_take_what_kernels_take,
    probes,
    calibrated_beside_a_training,
    collectives_are_timed,
    a_group_of_the_accelerator_alone_has_another_for_texts,
    ranks_far_ahead_hear_what_is_announced,
    captured,
)


def broken_laws(group):
    broken = []
    for law in LAWS:
        sim.set_delays(1e-4, seed=group.rank())
        sim.reset()
        try:
            law(group)
            torch.accelerator.synchronize()
        except Exception:
            return [(law.__name__, traceback.format_exc())]  # others wait for this rank
        found = [*sim.hazards(), *sim.errors()]
        if found:
            broken.append((law.__name__, *found[:5]))
    sim.reset()
    return broken


def test_measuring_is_right_on_a_device(tmp_path):
    for broken in on_devices(2, broken_laws, scratch=tmp_path):
        assert broken == []

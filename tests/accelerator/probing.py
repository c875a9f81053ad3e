"""Messages beside a training on the simulated accelerator, and whether they began too early."""

import time
from unittest.mock import patch

import torch
from accelerator import sim, trainings
from accelerator.trainings import here, plan_of

from gradweave import DistributedDataParallel
from gradweave._src.clocks import DeviceClock
from gradweave._src.comm.groups import common_place
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.stores import cloned_store
from gradweave._src.runtime.driving.announcements import Announcements
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.driving.queued_probing import QueuedProbing
from gradweave._src.session.commands import Probe

MOST_STEPS = 200
QUEUED = 50  # kernels that the device has still to do when probes are queued


class Prober:
    """A training on one rank, and the groups that its probes need; all ranks make one together."""

    def __init__(self, group):
        self._device, self._own, self._probes = here(group), OwnGroup(group, None), 0
        self._rank = group.rank()
        self._clock = DeviceClock(self._device)
        board = Noticeboard(group, common_place(group, cloned_store(group)))
        self._announcements = Announcements(board, self._clock, self._device)
        self._wrapped = DistributedDataParallel(trainings.network(self._device), plan=plan_of(2, 3))
        self._optimizer = trainings.optimizer_of(self._wrapped)
        self._data = trainings.batches(self._device, group.rank(), 1)

    def probe(self, ways, *, within_bytes=1 << 30):
        """What came of it here, and what began before the step that it follows was over."""
        self._probes += 1
        probing = QueuedProbing(
            Probe(
                ways=ways,
                sizes_bytes=(1024, 4096),
                required_sizes=1,
                within_s=60.0,
                within_bytes=within_bytes,
            ),
            self._own,
            self._announcements,
            clock=self._clock,
            device=self._device,
            name=f"probe {self._probes}",
        )
        early = []
        with patch.object(QueuedProbing, "_begin", _noting(QueuedProbing._begin, early)):
            for number in range(MOST_STEPS):
                trainings.take_step(self._wrapped, self._optimizer, self._data)
                self._announcements.pass_over()
                probing.pass_over()
                if number % 3 != self._rank:  # elsewhere this pass lies in the middle of a step
                    probing.step_over()
                if probing.part() is not None:
                    break
        part = probing.part()
        probing.close()
        return part, early

    def close(self):
        self._own.close()


def _noting(begin, early):
    def noted(self, announced):
        if not announced.sizes_bytes:
            begin(self, announced)
            return
        sim.keep_kernels()
        for _ in range(QUEUED):
            torch.zeros(1, device=self._device)
        asked_ns = time.monotonic_ns()
        begin(self, announced)
        self._stream.synchronize()
        ran = sim.kernels()
        sim.keep_kernels(keep=False)
        current = sim.stream_number(torch.accelerator.current_stream(self._device))
        own = sim.stream_number(self._stream)
        over_ns = max(k.end_ns for k in ran if k.stream == current and k.launched_ns < asked_ns)
        early.extend(
            f"{kernel.op} began before the step was over"
            for kernel in ran
            if kernel.stream == own and kernel.launched_ns > asked_ns > 0
            if kernel.start_ns < over_ns
        )

    return noted

"""What each rank of benchmarks/stragglers.py runs: ``python -m …stragglers_job FILE``."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch.distributed as dist

from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.ranks import default_group
from gradweave._src.bench.stragglers import Fault, StragglersQuestion, Watched
from gradweave._src.bench.trainee import BATCH
from gradweave._src.comm.small_messages import largest
from gradweave._src.phases import Phase
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.session.findings import Stage
from gradweave._src.workloads.replay import Replay

POLLED_EVERY_S = 0.002


class Stretched:
    """A timer for replays whose clock can be slowed down: what it times takes longer."""

    def __init__(self) -> None:
        self._times = 1.0
        self._since_s = self._reading_s = time.perf_counter()

    def take(self, times: float) -> None:
        """Let everything take so many times as long as it should, from now on."""
        now_s = time.perf_counter()
        self._reading_s += (now_s - self._since_s) / self._times
        self._since_s, self._times = now_s, times

    def now_s(self) -> float:
        return self._reading_s + (time.perf_counter() - self._since_s) / self._times

    def wait_until(self, moment_s: float) -> None:
        remaining_s = (moment_s - self.now_s()) * self._times
        if remaining_s > 0:
            time.sleep(remaining_s)


class Training:
    """One rank's steps, each with or without a fault of this rank's."""

    def __init__(self, question: StragglersQuestion, group: dist.ProcessGroup) -> None:
        self._question, self._timer = question, Stretched()
        self.wrapped = DistributedDataParallel(
            Replay(question.trace, timer=self._timer),
            process_group=group,
            init_sync=False,
            cache="",  # none, also where the environment names one
        )

    def step(self, fault: Fault | None) -> None:
        time.sleep(self._question.input_s * _times(fault, "input"))
        self.wrapped.zero_grad()
        self._timer.take(_times(fault, "forward"))
        loss = self.wrapped(BATCH)
        self._timer.take(_times(fault, "backward"))
        loss.backward()

    def steps_s(self, count: int, fault: Fault | None) -> list[float]:
        taken_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            self.step(fault)
            taken_s.append(time.perf_counter() - began_s)
        return taken_s


def _times(fault: Fault | None, phase: Phase) -> float:
    return 1 + fault.share if fault is not None and fault.phase == phase else 1.0


def settle(training: Training, group: dist.ProcessGroup) -> None:
    """Take the same number of steps on all ranks, until the last of them has settled."""
    is_open = 1.0
    while is_open:
        training.steps_s(5, None)
        is_settled = training.wrapped.findings().stage is Stage.SETTLED
        (is_open,) = largest(group, [float(not is_settled)])


def cases(question: StragglersQuestion, group: dist.ProcessGroup) -> Iterator[Watched]:
    training = Training(question, group)
    settle(training, group)
    for number, fault in enumerate(question.cases):
        while group.rank() == 0 and not Path(question.folder, str(number)).exists():
            time.sleep(POLLED_EVERY_S)
        group.barrier().wait()
        own = fault if fault is not None and fault.rank == group.rank() else None
        training.steps_s(question.settling_steps, own)
        taken_s = training.steps_s(question.steps, own)
        (step_s,) = largest(group, [median(taken_s)])
        found = training.wrapped.slow_ranks(steps=question.steps)
        yield Watched(number=number, fault=fault, step_s=step_s, found=found)


def main() -> None:
    question = asked(StragglersQuestion)
    with default_group() as group:
        for watched in cases(question, group):
            if group.rank() == 0:
                answer(watched)


if __name__ == "__main__":
    main()

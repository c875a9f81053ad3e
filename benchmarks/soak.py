"""An hour of training while links and ranks change: ``python benchmarks/soak.py OUTPUT``.

Two ranks, each on an emulated node of its own, train in float64 with ``replan_when``. Every few
seconds a link gets another rate, or a rank is stopped for a while and goes on. After each block of
steps torch's own wrapper takes the same steps, and all weights are compared bit for bit; memory,
descriptors and threads of each rank are noted. Writes OUTPUT.json (all of that) and OUTPUT.md, and
fails when weights differ or something has grown. ``--minutes 5`` takes less.
"""

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.distributed as dist
from ask_ranks import is_rank
from made_with import made_with
from msgspec import Struct
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src import files
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec, Job, OutputLine
from gradweave._src.session.findings import Stage

NODES = 2  # of which any order of additions gives the same bits
RATES = ("1gbit", "500mbit", "200mbit", "100mbit")
EVERY_S, STOPPED_S = (6.0, 14.0), (0.3, 2.0)  # at least and at most
STOPPED_SHARE = 0.3  # of all events; the others are rates
LAYERS, WIDTH, BATCH = 6, 256, 16
BLOCK_STEPS = 40
REPLAN_WHEN = 0.25
POLLED_EVERY_S = 0.02
ENDED_WITHIN_S = 120.0
LEAST_SAMPLES = 6
# Memory may grow a little: torch and Python keep some for later, too.
TOLERATED = {"memory_bytes": 1.05, "descriptors": 1.0, "threads": 1.0}
Ours = DistributedDataParallel | ShardedDataParallel
WRAPPERS: dict[str, type[DistributedDataParallel] | type[ShardedDataParallel]] = {
    "dense": DistributedDataParallel,
    "sharded": ShardedDataParallel,
}


class Event(Struct, frozen=True, tag_field="kind", kw_only=True):
    """Something that happens to a rank or its link, ``after_s`` seconds after the one before."""

    after_s: float
    rank: int


class Slowed(Event, frozen=True, kw_only=True, tag="slowed"):
    rate: str


class Stopped(Event, frozen=True, kw_only=True, tag="stopped"):
    for_s: float


class Sample(Struct, frozen=True, kw_only=True):
    """One rank after a block of steps."""

    rank: int
    steps: int
    elapsed_s: float
    stage: str
    plans: int  # that planning has settled on by now, with the first
    memory_bytes: int
    descriptors: int
    threads: int
    differs_by: float  # the largest element of all weights, from torch's


class Soaked(Struct, frozen=True, kw_only=True):
    made_with: str
    wrapper: str
    minutes: float
    events: list[Slowed | Stopped]
    samples: list[Sample]

    @property
    def problems(self) -> list[str]:
        if len(self.samples) < LEAST_SAMPLES * NODES:
            return ["too few samples to tell what grows"]
        found = []
        if any(sample.differs_by for sample in self.samples):
            found.append("weights differ from torch's")
        for rank in range(NODES):
            first, last = thirds([sample for sample in self.samples if sample.rank == rank])
            for name, factor in TOLERATED.items():
                most = max(getattr(sample, name) for sample in first)
                least = min(getattr(sample, name) for sample in last)
                if least > factor * most:
                    found.append(f"{name} of rank {rank} have grown from {most} to {least}")
        return found


def thirds(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Return the first and the last third of the samples.

    What has leaked is in all of the last and in none of the first.
    """
    each = max(1, len(samples) // 3)
    return samples[:each], samples[-each:]


def schedule(seed: int) -> Iterator[Slowed | Stopped]:
    """Yield events for ever, the same ones for the same seed."""
    draw = random.Random(seed)  # noqa: S311 no secret
    while True:
        after_s, rank = draw.uniform(*EVERY_S), draw.randrange(NODES)
        if draw.random() < STOPPED_SHARE:
            yield Stopped(after_s=after_s, rank=rank, for_s=draw.uniform(*STOPPED_S))
        else:
            yield Slowed(after_s=after_s, rank=rank, rate=draw.choice(RATES))


# On a rank: a process that trains, and its parent, which stops it and lets it go on.


def run_rank(folder: Path, wrapper: str) -> int:
    child = os.fork()
    if not child:
        train(folder, wrapper)
        return 0
    number = 0
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        request = folder / f"stop-{os.environ['RANK']}-{number}"
        if request.exists():
            os.kill(child, signal.SIGSTOP)
            time.sleep(float(request.read_text()))
            os.kill(child, signal.SIGCONT)
            number += 1
        time.sleep(POLLED_EVERY_S)


def train(folder: Path, wrapper: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _train(folder, wrapper)
    dist.destroy_process_group()  # after the wrappers are gone


def _train(folder: Path, wrapper: str) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    torchs = Training(TorchDDP(deepcopy(model)))
    ours = Training(WRAPPERS[wrapper](model, replan_when=REPLAN_WHEN))
    began_s, is_over = time.monotonic(), False
    while not is_over:
        ours.take_steps(BLOCK_STEPS)
        torchs.take_steps(BLOCK_STEPS)
        told = sample(ours, differs_by=difference(ours, torchs), began_s=began_s)
        print(msgspec.json.encode(told).decode(), flush=True)
        is_over = agreed(is_over=(folder / "over").exists())


class Training:
    """A model that takes a step on the data of each number, whoever wraps it."""

    def __init__(self, wrapped: TorchDDP | ShardedDataParallel) -> None:
        self.wrapped, self.steps, self.plans = wrapped, 0, 0
        self._optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        self._is_settled = False

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            seed = self.steps * NODES + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            batch = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
            self._optimizer.zero_grad()
            self.wrapped(batch).square().mean().backward()
            self._optimizer.step()
            self.steps += 1
            self._count_plans()

    def _count_plans(self) -> None:
        if isinstance(self.wrapped, Ours):
            was, self._is_settled = self._is_settled, self.stage is Stage.SETTLED
            self.plans += self._is_settled and not was

    @property
    def stage(self) -> Stage:
        assert isinstance(self.wrapped, Ours)
        return self.wrapped.findings().stage

    def weights(self) -> list[torch.Tensor]:
        if isinstance(self.wrapped, ShardedDataParallel):
            self.wrapped.synchronise()
        return [parameter.detach() for parameter in self.wrapped.module.parameters()]


def difference(ours: Training, torchs: Training) -> float:
    pairs = zip(ours.weights(), torchs.weights(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def sample(ours: Training, *, differs_by: float, began_s: float) -> Sample:
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        rank=dist.get_rank(),
        steps=ours.steps,
        elapsed_s=time.monotonic() - began_s,
        stage=ours.stage,
        plans=ours.plans,
        memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        differs_by=differs_by,
    )


def agreed(*, is_over: bool) -> bool:
    """Return what rank 0 says, for all ranks must take the same steps."""
    told = torch.tensor([is_over], dtype=torch.uint8)
    dist.broadcast(told, src=0)
    return bool(told)


# Beside the ranks: who changes links and asks for stops.


def soaked(options: argparse.Namespace) -> Soaked:
    samples: list[Sample] = []
    events: list[Slowed | Stopped] = []

    def take(line: OutputLine) -> None:
        if line.text.startswith("{"):
            samples.append(msgspec.json.decode(line.text, type=Sample))
        else:
            print(f"rank {line.rank}: {line.text}", flush=True)

    with (
        TemporaryDirectory(prefix="gradweave-") as folder,
        Cluster(ClusterSpec(nodes=NODES, rate=RATES[0])) as cluster,
    ):
        command = [sys.executable, __file__, folder, "--wrapper", options.wrapper]
        job = cluster.start(command, on_line=take)
        over_s = time.monotonic() + 60 * options.minutes
        stops = [0] * NODES
        for event in schedule(options.seed):
            if time.monotonic() + event.after_s > over_s:
                break
            _require_running(job, event.after_s)
            if isinstance(event, Slowed):
                cluster.set_rate(event.rank, event.rate)
            else:
                _ask_to_stop(Path(folder), event, stops[event.rank])
                stops[event.rank] += 1
            events.append(event)
            print(f"{event}; {len(samples)} samples", flush=True)
        Path(folder, "over").touch()
        result = job.wait(ENDED_WITHIN_S)
    if result.first_failure is not None:
        raise SystemExit(str(result.first_failure))
    return Soaked(
        made_with=made_with(),
        wrapper=options.wrapper,
        minutes=options.minutes,
        events=events,
        samples=samples,
    )


def _require_running(job: Job, for_s: float) -> None:
    """Wait so long, and exit where ranks end meanwhile, for they have failed."""
    with suppress(LabError):
        raise SystemExit(str(job.wait(for_s).first_failure))


def _ask_to_stop(folder: Path, event: Stopped, number: int) -> None:
    partial = folder / "stop.partial"
    partial.write_text(str(event.for_s))
    partial.rename(folder / f"stop-{event.rank}-{number}")


def page(found: Soaked, name: str) -> str:
    slowed = sum(isinstance(event, Slowed) for event in found.events)
    last = max(found.samples, key=lambda sample: sample.steps)
    lines = [
        "# A soak",
        "",
        f"Made by `python benchmarks/soak.py {name} --minutes {found.minutes:g} --wrapper "
        f"{found.wrapper}`: {NODES} ranks on emulated nodes, {slowed} changes of rates between "
        f"{RATES[-1]} and {RATES[0]}, {len(found.events) - slowed} times a rank was stopped for "
        f"{STOPPED_S[0]:g} to {STOPPED_S[1]:g} s, replan_when={REPLAN_WHEN:g}.",
        "",
        f"{last.steps} steps, {last.plans} plans; weights were compared with torch's "
        f"{len(found.samples) // NODES} times, and differed by "
        f"{max(sample.differs_by for sample in found.samples):g} at most.",
        "",
        "| rank | | first third: median, largest | last third: median, least |",
        "|---:|---|---:|---:|",
        *_rows(found.samples),
        "",
        *[f"- **{problem}**" for problem in found.problems],
        found.made_with,
    ]
    return "\n".join(lines) + "\n"


def _rows(samples: Sequence[Sample]) -> Iterator[str]:
    for rank in range(NODES):
        first, last = thirds([sample for sample in samples if sample.rank == rank])
        for name, unit in (("memory_bytes", 2**20), ("descriptors", 1), ("threads", 1)):
            before = [getattr(sample, name) / unit for sample in first]
            after = [getattr(sample, name) / unit for sample in last]
            title = "memory, MiB" if unit > 1 else name
            yield (
                f"| {rank} | {title} | {median(before):.0f}, {max(before):.0f} "
                f"| {median(after):.0f}, {min(after):.0f} |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--wrapper", choices=WRAPPERS, default="dense")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (default: 0)")
    options = parser.parse_args()
    if is_rank():
        return run_rank(options.output, options.wrapper)
    found = soaked(options)
    files.write_text(options.output.with_suffix(".json"), msgspec.json.encode(found).decode())
    text = page(found, options.output.name)
    files.write_text(options.output.with_suffix(".md"), text)
    print(text)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())

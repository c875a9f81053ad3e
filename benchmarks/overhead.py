"""What a settled step of a tiny model costs more than with torch's own wrapper.

``python benchmarks/overhead.py``: two ranks on this machine train one model under each wrapper in
turn, step by step, ours when it has settled on one message, as torch's own. Prints medians of the
paired differences with a 95 % interval, by the clock and in processor time of the main thread; a
second wrapper of torch's says what the method itself sees, and one of ours that does not look at
its clock what it costs to tell who is slow. Half a minute; leave the machine alone meanwhile.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel
from gradweave._src.cli.tables import print_table
from gradweave._src.lab import Cluster, ClusterSpec, OutputLine

INPUTS, OUTPUTS, BATCH = 16, 4, 8
WARMUP_ROUNDS = 30
RESAMPLED = 1000
MEASURED = "measured "
TORCHS = "torch's wrapper"
CLOCKS = ("by the clock", "main thread")


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a step takes than with torch's wrapper; milliseconds, medians."""

    wrapper: str
    clock: str
    torchs_ms: float
    more_ms: float
    low_ms: float
    high_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1200, help="default: 1200")
    parser.add_argument("--width", type=int, default=64, help="of each layer (default: 64)")
    parser.add_argument("--layers", type=int, default=4, help="hidden ones (default: 4)")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args()
    if "RANK" in os.environ:
        found = measured(options.rounds, width=options.width, layers=options.layers)
        if int(os.environ["RANK"]) == 0:
            print(MEASURED + json.dumps([asdict(one) for one in found]), flush=True)
        return
    found = on_two_ranks()
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        show(found)


def on_two_ranks() -> list[Difference]:
    """Run this program with the same arguments on two ranks; return what rank 0 saw."""
    found: list[Difference] = []

    def take(line: OutputLine) -> None:
        if line.text.startswith(MEASURED):
            rows = json.loads(line.text.removeprefix(MEASURED))
            found.extend(Difference(**row) for row in rows)

    with Cluster(ClusterSpec(nodes=2), loopback=True) as cluster:
        program = [sys.executable, __file__, *sys.argv[1:]]
        result = cluster.start(program, on_line=take).wait()
    if result.first_failure is not None:
        raise SystemExit(str(result.first_failure))
    return found


def measured(rounds: int, *, width: int, layers: int) -> list[Difference]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = _in_turn(rounds, width=width, layers=layers)
    dist.destroy_process_group()
    return found


def _in_turn(rounds: int, *, width: int, layers: int) -> list[Difference]:
    """Time the wrappers in turn; they die with this frame, before their group."""
    ours, without_clock = (
        DistributedDataParallel(model(width, layers), planner="single", trial_steps=0)
        for _ in range(2)
    )
    for wrapped in (ours, without_clock):
        settle(wrapped)
    stop_clock(without_clock)
    wrappers = {
        TORCHS: TorchDDP(model(width, layers)),
        "ours": ours,
        "ours without its clock": without_clock,
        "torch's wrapper again": TorchDDP(model(width, layers)),
    }
    steps = {name: stepper(wrapped) for name, wrapped in wrappers.items()}
    taken_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(WARMUP_ROUNDS + rounds):
        for name in steps if number % 2 else reversed(steps):
            taken = steps[name]()
            if number >= WARMUP_ROUNDS:
                taken_ms[name].append(taken)
    others = [name for name in steps if name != TORCHS]
    return [
        _difference(name, clock, [t[number] for t in taken_ms[name]], torchs)
        for number, clock in enumerate(CLOCKS)
        for torchs in [[t[number] for t in taken_ms[TORCHS]]]
        for name in others
    ]


def settle(wrapped: DistributedDataParallel) -> None:
    """Take the same number of steps on all ranks, until the last of them has settled."""
    step = stepper(wrapped)
    is_open = torch.ones(1)
    while is_open.item():
        step()
        is_open.fill_(wrapped.findings().stage != "settled")
        dist.all_reduce(is_open)


def stop_clock(wrapped: DistributedDataParallel) -> None:
    """Have a wrapper time no phases any more, nor tell other ranks of them."""
    assert wrapped._last_gradient is not None  # noqa: SLF001
    wrapped._last_gradient.close()  # noqa: SLF001
    wrapped._clock = wrapped._news = None  # noqa: SLF001


def model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), *hidden, nn.Linear(width, OUTPUTS))


def stepper(wrapped: nn.Module) -> Callable[[], tuple[float, float]]:
    """Return a function that takes one step and says what it took by both clocks, in ms."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0, foreach=True)  # no denormal numbers
    batch = torch.ones(BATCH, INPUTS)

    def step() -> tuple[float, float]:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        return (time.perf_counter() - began_s) * 1e3, (time.thread_time() - began_cpu_s) * 1e3

    return step


def _difference(name: str, clock: str, mine: list[float], torchs: list[float]) -> Difference:
    more_ms = [a - b for a, b in zip(mine, torchs, strict=True)]
    draw = random.Random(0)  # noqa: S311 resampling keeps no secret
    resampled = sorted(median(draw.choices(more_ms, k=len(more_ms))) for _ in range(RESAMPLED))
    return Difference(
        wrapper=name,
        clock=clock,
        torchs_ms=median(torchs),
        more_ms=median(more_ms),
        low_ms=resampled[round(0.025 * RESAMPLED)],
        high_ms=resampled[round(0.975 * RESAMPLED) - 1],
    )


def show(found: list[Difference]) -> None:
    print_table(
        "a settled step of a tiny model, against torch's wrapper in turn: medians",
        {
            "wrapper": [one.wrapper for one in found],
            "clock": [one.clock for one in found],
            "torch's ms": [f"{one.torchs_ms:.3f}" for one in found],
            "more ms": [f"{one.more_ms:+.3f}" for one in found],
            "95 % interval": [f"{one.low_ms:+.3f} … {one.high_ms:+.3f}" for one in found],
        },
    )


if __name__ == "__main__":
    main()

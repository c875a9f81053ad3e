"""Memory of a rank in training: ``python benchmarks/memory.py OUTPUT``.

Four workers train a model of 25 million parameters with Adam under torch's wrapper and ours. What
is measured is how far the largest resident memory lies above that before the model was made, so it
holds parameters, gradients, the optimizer's state, buckets, and what a step needs besides: from
wrapping until our wrapper has settled, others for as many steps, and in a few steady steps after
that. Writes OUTPUT.md. A few minutes on two cores.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from made_with import made_with
from msgspec import Struct
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.lab import Cluster, ClusterSpec, OutputLine
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel

WORKERS = 4
LAYERS, WIDTH = 6, 2048
STEPS = 3
WARMUP = 2  # steps before those that are steady
MOST_STEPS = 2000  # of planning
KINDS = {
    "torch-ddp": "torch's wrapper",
    "torch-ddp-views": "torch's wrapper with gradient_as_bucket_view",
    "gradweave": "DistributedDataParallel",
    "sharded": "ShardedDataParallel, with a plan",
}


class Memory(Struct, frozen=True, kw_only=True):
    """The largest memory of one rank in two stretches of a training."""

    beginning_mb: float  # from wrapping until it was settled
    beginning_steps: int
    steady_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix, or what a rank runs")
    parser.add_argument("--beginning", type=int, default=WARMUP, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        mine = measured(options.output.name, options.beginning)
        print(msgspec.json.encode(mine).decode(), flush=True)
        return
    # Ours first: the memory of a process grows a little from step to step, whoever wraps.
    ours = on_all_ranks("gradweave")
    steps = ours[0].beginning_steps
    others = [kind for kind in KINDS if kind != "gradweave"]
    found = {kind: on_all_ranks(kind, beginning=steps) for kind in others}
    options.output.with_suffix(".md").write_text(page({**found, "gradweave": ours}))


def on_all_ranks(kind: str, *, beginning: int = WARMUP) -> list[Memory]:
    found: list[Memory] = []

    def take(line: OutputLine) -> None:
        if line.text.startswith("{"):
            found.append(msgspec.json.decode(line.text, type=Memory))

    command = [sys.executable, __file__, kind, "--beginning", str(beginning)]
    with Cluster(ClusterSpec(nodes=WORKERS), loopback=True) as cluster:
        result = cluster.start(command, on_line=take).wait()
    if result.first_failure is not None:
        raise SystemExit(str(result.first_failure))
    return found


def page(found: Mapping[str, Sequence[Memory]]) -> str:
    elements = sum(parameter.numel() for parameter in model().parameters())
    steps = found["gradweave"][0].beginning_steps
    steady_mb = {kind: [one.steady_mb for one in ranks] for kind, ranks in found.items()}
    first_mb = {kind: [one.beginning_mb for one in ranks] for kind, ranks in found.items()}
    lines = [
        "# Memory of a rank in training",
        "",
        made_with(),
        "",
        f"Made by `python benchmarks/memory.py`: {WORKERS} workers, {elements / 1e6:.1f} million "
        f"parameters ({elements * 4 / 1e6:.0f} MB), Adam. The largest resident memory above that "
        "before the model was made; median over the ranks.",
        "",
        f"From wrapping on, until DistributedDataParallel has settled: {steps} steps.",
        "",
        *_table(first_mb),
        "",
        f"In {STEPS} steady steps after those:",
        "",
        *_table(steady_mb),
    ]
    return "\n".join(lines) + "\n"


def _table(peaks_mb: Mapping[str, list[float]]) -> list[str]:
    torchs_mb = median(peaks_mb["torch-ddp"])
    rows = ((text, median(peaks_mb[kind])) for kind, text in KINDS.items())
    return [
        "| | MB | of torch's |",
        "|---|---:|---:|",
        *(f"| {text} | {mb:.0f} | {mb / torchs_mb:.0%} |" for text, mb in rows),
    ]


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def measured(kind: str, beginning: int) -> Memory:
    """Measure one rank, which begins for so many steps, or for as long as planning takes."""
    dist.init_process_group("gloo")
    TorchDDP(nn.Linear(1, 1))  # imports what wrappers need
    before_mb = resident_mb("VmRSS")
    unwrapped = model()
    forget_largest()
    wrapped = _wrapped(kind, unwrapped)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    batch = torch.ones(2, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()

    steps = 0
    while steps < beginning or not _is_settled(wrapped):
        if steps == MOST_STEPS:
            raise SystemExit(f"{kind} has not settled after {MOST_STEPS} steps")
        step()
        steps += 1
    beginning_mb = resident_mb("VmHWM") - before_mb
    forget_largest()
    for _ in range(STEPS):
        step()
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    steady_mb = resident_mb("VmHWM") - before_mb
    return Memory(beginning_mb=beginning_mb, beginning_steps=steps, steady_mb=steady_mb)


def _is_settled(wrapped: nn.Module) -> bool:
    return not isinstance(wrapped, DistributedDataParallel) or (
        wrapped.findings().stage == "settled"
    )


def _wrapped(kind: str, unwrapped: nn.Module) -> nn.Module:
    if kind == "gradweave":
        return DistributedDataParallel(unwrapped)
    if kind == "sharded":
        buckets = tuple(
            Bucket(tensors=(f"{layer}.bias", f"{layer}.weight"), collective="ring")
            for layer in reversed(range(LAYERS))
        )
        plan = Plan(planner="by layer", buckets=buckets, passes="both")
        return ShardedDataParallel(unwrapped, plan=plan)
    return TorchDDP(unwrapped, gradient_as_bucket_view=kind == "torch-ddp-views")


def forget_largest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kib) * 1024 / 1e6


if __name__ == "__main__":
    main()

"""Memory of a rank in training: ``python benchmarks/memory.py OUTPUT``.

Four workers train a model of 25 million parameters with Adam for a few steps under torch's wrapper
and ours. What is measured is how far the largest resident memory during steady steps lies above
that before the model was made, so it holds parameters, gradients, the optimizer's state, buckets,
and what a step needs besides. Writes OUTPUT.md. A minute on two cores.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.lab import Cluster, ClusterSpec, OutputLine
from gradweave.plan import Bucket, Plan
from gradweave.runtime.sharded import ShardedDataParallel

WORKERS = 4
LAYERS, WIDTH = 6, 2048
STEPS = 3
KINDS = {
    "torch-ddp": "torch's wrapper",
    "torch-ddp-views": "torch's wrapper with gradient_as_bucket_view",
    "sharded": "ShardedDataParallel",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix, or what a rank runs")
    options = parser.parse_args()
    if "RANK" in os.environ:
        print(f"measured {measured_mb(options.output.name)}", flush=True)
        return
    found = {kind: on_all_ranks(kind) for kind in KINDS}
    options.output.with_suffix(".md").write_text(page(found))


def on_all_ranks(kind: str) -> list[float]:
    found: list[float] = []

    def take(line: OutputLine) -> None:
        if line.text.startswith("measured "):
            found.append(float(line.text.split()[1]))

    with Cluster(ClusterSpec(nodes=WORKERS), loopback=True) as cluster:
        result = cluster.start([sys.executable, __file__, kind], on_line=take).wait()
    if result.first_failure is not None:
        raise SystemExit(str(result.first_failure))
    return found


def page(found: dict[str, list[float]]) -> str:
    elements = sum(parameter.numel() for parameter in model().parameters())
    lines = [
        "# Memory of a rank in training",
        "",
        f"Made by `python benchmarks/memory.py`: {WORKERS} workers, {elements / 1e6:.1f} million "
        f"parameters ({elements * 4 / 1e6:.0f} MB), Adam. The largest resident memory in steady "
        "steps, above that before the model was made; median over the ranks.",
        "",
        "| | MB | of torch's |",
        "|---|---:|---:|",
    ]
    torchs = median(found["torch-ddp"])
    for kind, text in KINDS.items():
        lines.append(f"| {text} | {median(found[kind]):.0f} | {median(found[kind]) / torchs:.0%} |")
    return "\n".join(lines) + "\n"


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def measured_mb(kind: str) -> float:
    dist.init_process_group("gloo")
    TorchDDP(nn.Linear(1, 1))  # imports what wrappers need
    before_mb = resident_mb("VmRSS")
    wrapped = _wrapped(kind)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    batch = torch.ones(2, WIDTH)
    for number in range(2 + STEPS):
        if number == 2:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the largest so far
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    return resident_mb("VmHWM") - before_mb


def _wrapped(kind: str) -> nn.Module:
    if kind == "sharded":
        buckets = tuple(
            Bucket(tensors=(f"{layer}.bias", f"{layer}.weight"), collective="ring")
            for layer in reversed(range(LAYERS))
        )
        plan = Plan(planner="by layer", buckets=buckets, passes="both")
        return ShardedDataParallel(model(), plan=plan)
    return TorchDDP(model(), gradient_as_bucket_view=kind == "torch-ddp-views")


def resident_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kib) * 1024 / 1e6


if __name__ == "__main__":
    main()

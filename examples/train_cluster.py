"""Train a small CNN on several machines, say what was found, and keep the run for a page.

It trains on CPUs unless it is given another device, such as --device cuda.

torchrun --nnodes=2 … examples/train_cluster.py          (docs/cluster.md has the whole line)
gradweave lab --nodes 2 --rate 200mbit -- python examples/train_cluster.py [--wrapper torch]
gradweave report runs/mine
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradweave
from gradweave.workloads import Batches, SmallCNN, fashion_mnist_subset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrapper", choices=["gradweave", "torch"], default="gradweave")
    parser.add_argument("--device", default="cpu", metavar="KIND", help="cpu, or such as cuda")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", default="runs/mine", metavar="DIR", help="of the run")
    options = parser.parse_args()
    device = own_device(options.device)
    dist.init_process_group()
    train(options, device)
    dist.destroy_process_group()  # after the wrapper is gone


def own_device(kind: str) -> torch.device:
    """Return the CPU, or the accelerator of this rank: torchrun numbers a machine's ranks."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)
    return device


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    module = SmallCNN().to(device)
    if options.wrapper == "gradweave":
        model = watched = gradweave.DistributedDataParallel(module, timeline=True)
    else:
        model = TorchDDP(module)
        watched = gradweave.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, rank, world = fashion_mnist_subset(train=True), dist.get_rank(), dist.get_world_size()
    batches = Batches(examples=len(images), batch_size=64, world=world, rank=rank)
    losses = []
    for step in range(options.steps):
        batch = images.take(batches.indices(step))
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.normalised().to(device)), batch.labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    watched.save_run(options.output, losses=losses)  # on every rank; rank 0 writes
    if rank == 0:
        print(f"{world} ranks, loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
        print(watched.metrics() if options.wrapper == "torch" else watched.explain())


if __name__ == "__main__":
    main()

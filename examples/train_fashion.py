"""Train ResNet-20 on the shipped images, with torch's wrapper or with ours.

torchrun --nproc-per-node 2 examples/train_fashion.py [--stock]
gradweave lab --nodes 4 --rate 1gbit -- python examples/train_fashion.py
"""

import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from gradweave import DistributedDataParallel
from gradweave.workloads import Batches, fashion_mnist_subset, resnet20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", action="store_true", help="torch's own wrapper")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group()
    train(stock=options.stock, steps=options.steps)
    dist.destroy_process_group()  # after the wrapper is gone


def train(*, stock: bool, steps: int) -> None:
    torch.manual_seed(0)
    wrapper = torch.nn.parallel.DistributedDataParallel if stock else DistributedDataParallel
    model = wrapper(resnet20(channels=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = fashion_mnist_subset(train=True)
    batches = Batches(
        examples=len(images),
        batch_size=16,
        world=dist.get_world_size(),
        rank=dist.get_rank(),
    )
    for step in range(steps):
        batch = images.take(batches.indices(step))
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.normalised()), batch.labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0 and not stock:
        print(model.explain())


if __name__ == "__main__":
    main()

"""Train a small GPT-2 on a text file, character by character, with torch's wrapper or with ours.

torchrun --nproc-per-node 2 examples/train_text.py README.md [--stock]
gradweave lab --nodes 4 --rate 100mbit -- python examples/train_text.py README.md
"""

import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from gradweave import DistributedDataParallel
from gradweave.workloads import Batches, CharTransformer, load_text

WINDOW = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="a file in UTF-8")
    parser.add_argument("--stock", action="store_true", help="torch's own wrapper")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=192)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group()
    train(options)
    dist.destroy_process_group()  # after the wrapper is gone


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    text = load_text(options.text)
    inputs, targets = text.windows(WINDOW)
    wrap = torch.nn.parallel.DistributedDataParallel if options.stock else DistributedDataParallel
    model = wrap(CharTransformer(len(text.vocabulary), width=options.width, window=WINDOW))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(
        examples=len(inputs), batch_size=8, world=dist.get_world_size(), rank=dist.get_rank()
    )
    for step in range(options.steps):
        chosen = batches.indices(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0 and not options.stock:
        print(model.explain())


if __name__ == "__main__":
    main()

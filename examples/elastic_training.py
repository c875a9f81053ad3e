"""A training that torchrun may start again, on as many workers as there are then.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 \
    examples/elastic_training.py checkpoints --crash-at 90

Each life goes on from the last checkpoint that is complete, with the plan that was found before.
"""

import argparse
import logging
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from gradweave import (
    DistributedDataParallel,
    GTopK,
    Recipe,
    ShardedDataParallel,
    TrainingState,
    saved_recipe,
)
from gradweave.workloads import SmallCNN, fashion_mnist_subset


def sparsified(model: torch.nn.Module, plan: Recipe | None) -> DistributedDataParallel:
    """One message for the whole model, of which there is nothing to plan."""
    del plan
    return DistributedDataParallel(model, compression=GTopK(density=0.05, whole_model=True))


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "sharded": ShardedDataParallel,
    "sparse": sparsified,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for checkpoints, which all workers see")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="ddp")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    parser.add_argument("--crash-at", type=int, help="a step in which the last worker dies, once")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()  # after the wrapper is gone


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    last = last_checkpoint(options.folder)
    model = WRAPPERS[options.wrapper](SmallCNN(), plan=last and saved_recipe(last))
    optimizer = torch.optim.AdamW(model.parameters())
    state, first = TrainingState(model, optimizer), 0
    if last is not None:
        state.load(last)
        first = int(last.name.removeprefix("step-"))
    planning = (
        model.findings().stage
    )  # settled, where the checkpoint has a recipe for these workers
    print(f"worker {rank} of {world} goes on from step {first}, planning: {planning}", flush=True)
    images = fashion_mnist_subset(train=True)
    for step in range(first, options.steps):
        if step == options.crash_at and rank == world - 1 and is_first_life():
            os.kill(os.getpid(), signal.SIGKILL)
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:24]
        batch = images.take(chosen.chunk(world)[rank])  # one batch for all, however many there are
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.normalised()), batch.labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % options.every == 0:
            state.save(options.folder / f"step-{step + 1:06}")
            print(f"worker {rank}, step {step + 1}: loss {loss.item():.9f}", flush=True)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest one that is complete, which rank 0 tells by its .metadata."""
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    found = [complete[-1] if complete else None]
    dist.broadcast_object_list(found)
    return found[0]


def is_first_life() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


if __name__ == "__main__":
    main()

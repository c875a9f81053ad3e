"""Training with workers that load data, beside our threads.

``python loading.py HOW WRAPPER EPOCHS``: HOW is fork, spawn or here (no workers). Workers begin
anew for each epoch: while steps are recorded, messages probed and plans tried, and after that.
"""

import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradweave import DistributedDataParallel, ShardedDataParallel

WRAPPERS = {"ddp": DistributedDataParallel, "sharded": ShardedDataParallel}
STEPS, BATCH = 96, 4


class Numbers(Dataset):
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return self.batches * BATCH

    def __getitem__(self, index):
        return torch.full((32,), float(index % 7))


def loader(how, batches):
    workers = {} if how == "here" else {"num_workers": 2, "multiprocessing_context": how}
    return DataLoader(Numbers(batches), batch_size=BATCH, **workers)


def main(how, wrapper, epochs):
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    busy = set()
    for _ in range(int(epochs)):
        for batch in loader(how, STEPS // int(epochs)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            busy |= {one.name for one in threading.enumerate() if "gradweave" in one.name}
    total = sum(value.double().sum().item() for value in model.state_dict().values())
    stage = model.findings().stage
    print(f"{stage} with {total:.12f} beside {sorted(busy)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()

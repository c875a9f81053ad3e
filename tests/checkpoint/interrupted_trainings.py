"""Small trainings that are interrupted, with each wrapper and several optimizers."""

import torch
from ranks import on_processes
from torch import nn

import gradweave
from gradweave._src.plan import Bucket, Plan
from gradweave._src.sparse.settings import GTopK

STEPS, SAVED_AFTER = 6, 3
PLAN = Plan(
    planner="made",
    buckets=tuple(
        Bucket(tensors=names, collective="ring")
        for names in (("2.bias", "2.weight", "0.bias"), ("0.weight",))
    ),
    passes="both",
)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
SPARSE = GTopK(density=0.2, momentum=0.9, whole_model=True)
WRAPPERS = {
    "ddp": lambda model: gradweave.DistributedDataParallel(model, trial_steps=0),
    "sharded": lambda model: gradweave.ShardedDataParallel(model, plan=PLAN),
    "torch": nn.parallel.DistributedDataParallel,
    "sparse": lambda model: gradweave.DistributedDataParallel(model, compression=SPARSE),
}


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    layers[0].weight.data = layers[0].weight.data.t().contiguous().t()  # another order in memory
    return layers


def made(wrapper, optimizer):
    model = WRAPPERS[wrapper](network())
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model, optimizer, group, first, last):
    """Everybody's batches are parts of one, so that any number of ranks sees the same."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(batch.chunk(group.size())[group.rank()]) ** 2).mean()
        loss.backward()
        optimizer.step()
    return {
        name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()
    }


def run(world, fn, *args, scratch):
    scratch.mkdir()
    return on_processes(world, fn, *args, scratch=scratch)


def assert_equal(states, expected, **tolerance):
    for state in states:
        for name, value in expected.items():
            if tolerance:
                found, wanted = (torch.tensor(one).double() for one in (state[name], value))
                torch.testing.assert_close(found, wanted, **tolerance)
            else:
                assert state[name] == value, name

"""What a sharded wrapper opens is closed when it goes, in whatever stage of planning."""

import gc
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import python
from ranks import on_processes
from sharded_training import MADE, OPTIMIZERS, batches, small
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from gradweave._src.runtime.sharded import ShardedDataParallel

WRAPPERS, STEPS = 20, 3


def trained(group, options):
    wrapped = ShardedDataParallel(small(), **options)
    optimizer = OPTIMIZERS["adamw"](wrapped.parameters())
    for step in batches(group.size(), STEPS):
        optimizer.zero_grad()
        (wrapped(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return wrapped.module


def open_things():
    gc.collect()
    threads, descriptors = (
        len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd")
    )
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    return threads, descriptors, len(_world.pg_map), hooks


def made_and_dropped(group, options):
    """Ranks drop theirs when they like: garbage is collected at other times on other ranks."""
    gc.disable()
    trained(group, options)
    before = open_things()
    for number in range(WRAPPERS):
        module = trained(group, options)
        if number % (group.rank() + 2) == 0:
            gc.collect()
    hooks = sum(len(part._forward_pre_hooks) for part in module.modules())
    hooks += sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
    hooks += clip_grad._get_total_norm is not nn.utils.get_total_norm
    return before, open_things(), hooks


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="planning"),
        pytest.param({"plan": MADE}, id="planned", marks=pytest.mark.long),
    ],
)
def test_twenty_wrappers_leave_nothing(options, tmp_path):
    """Seconds: processes, which have torch's default group."""
    for before, after, hooks in on_processes(2, made_and_dropped, options, scratch=tmp_path):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        assert hooks == 0


SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from gradweave._src.comm.communicator import Communicator
    from gradweave._src.plan import Bucket, Plan
    from gradweave._src.runtime.flat import engine as flat_engine
    from gradweave._src.runtime.sharded import ShardedDataParallel

    rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    names = ("bias", "weight")
    plan = Plan(planner="made", buckets=(Bucket(tensors=names, collective="ring"),), passes="both")
    model = ShardedDataParallel(nn.Linear(3, 2), plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 1 and step == 2 and how == "raises":
            raise ValueError("the user's own mistake")
        if rank == 1 and step == 2 and how == "ends":
            sys.exit(0)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    if how == "reads" and rank == 0:
        model.synchronise()
"""


def ended(how, folder):
    """Return how the two ranks of a script ended, and what they said."""
    code, store = textwrap.dedent(SCRIPT), folder / "store"
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: python("-c", code, rank, store, how), range(2)))
    return [rank.returncode for rank in ranks], [rank.stderr for rank in ranks]


@pytest.mark.parametrize(
    ("how", "codes"), [("raises", [1, 1]), ("ends", [1, 0]), ("reads", [0, 0])]
)
def test_a_script_ends_when_others_are_gone(how, codes, tmp_path):
    """Seconds: whole scripts. What others wait for is sent before a rank goes."""
    found, said = ended(how, tmp_path)
    assert found == codes, said
    if how != "reads":
        assert "rank 0, step 3, bucket 1 of 1" in said[0]

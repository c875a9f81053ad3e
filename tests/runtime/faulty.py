"""A rank that does something bad in its fifth step: ``python faulty.py KIND WAY FILE``, on all.

KIND is killed, stalled or hook; WAY is how buckets travel: plain (without a hook), native or ring.
Or KIND is gone: rank 0 is killed before the step, and its buffers are waited for in forward; WAY is
ddp or sharded. By FILE, which is not there, rank 0 tells that its first bucket has arrived.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave._src.comm.communicator import Communicator
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel

# Of the group; and what ranks may take to meet, on a busy machine.
TIMEOUT, MEETING = timedelta(seconds=4), timedelta(seconds=60)
BAD_STEP = 5
BUCKETS = (("1.bias", "1.weight"), ("0.bias", "0.weight"))


def plan_by(collective: str) -> Plan:
    buckets = tuple(Bucket(tensors=names, collective=collective) for names in BUCKETS)
    return Plan(planner="made", buckets=buckets)


def tell_of_arrival(way: str, arrived: Path) -> None:
    """Touch the file when a bucket has been averaged here; without a hook nobody sees that."""
    if way == "plain":
        arrived.touch()
        return
    owner, name = (Communicator, "run") if way == "ring" else (SpanRecorder, "done")
    averaged = getattr(owner, name)

    def told(*args: Any, **options: Any) -> None:
        averaged(*args, **options)
        arrived.touch()

    setattr(owner, name, told)


def misbehave(kind: str, arrived: Path) -> None:
    if kind == "killed":
        while not arrived.exists():  # the first bucket, which another thread may be sending
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stalled":
        time.sleep(60)


def failing(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    if dist.get_rank() == 1 and len(state) > 2 * BAD_STEP:
        raise ValueError("the hook of rank 1 has failed")
    work = dist.group.WORLD.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


def train_until_gone(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapper = ShardedDataParallel if way == "sharded" else DistributedDataParallel
    wrapped = wrapper(model, trial_steps=0, record_steps=100)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(1, 9):
        if step == BAD_STEP and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained to the end", flush=True)  # noqa: T201


def main(kind: str, way: str, arrived: Path) -> None:
    if kind == "gone":
        train_until_gone(way)
        return
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_by("ring" if way == "ring" else "native")
    wrapped = DistributedDataParallel(model, plan=plan, timeline=way == "native")
    if kind == "hook":
        wrapped.register_comm_hook([], failing)
    for step in range(1, 9):
        loss = wrapped(torch.ones(2, 4)).sum()
        if step == BAD_STEP and dist.get_rank() == 1:
            model[0].weight.register_hook(lambda _: misbehave(kind, arrived))  # between buckets
        if step == BAD_STEP and dist.get_rank() == 0:
            tell_of_arrival(way, arrived)
        loss.backward()
    print("trained to the end", flush=True)  # noqa: T201


def join() -> None:
    """As ``init_process_group`` does by the environment, but ranks may begin late."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=MEETING)
    store.set_timeout(TIMEOUT)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)


if __name__ == "__main__":
    join()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

"""A rank that does something bad in its fifth step: ``python faulty.py KIND``, on every rank."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from gradweave.plan import Bucket, Plan
from gradweave.runtime.ddp import DistributedDataParallel

TIMEOUT = timedelta(seconds=4)
BAD_STEP = 5
PLAN = Plan(
    planner="made",
    buckets=(
        Bucket(tensors=("1.bias", "1.weight"), collective="native"),
        Bucket(tensors=("0.bias", "0.weight"), collective="native"),
    ),
)


def misbehave(kind: str) -> None:
    if kind in {"killed", "thread"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stalled":
        time.sleep(60)


def failing(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    if dist.get_rank() == 1 and len(state) > 2 * BAD_STEP:
        raise ValueError("the hook of rank 1 has failed")
    work = dist.group.WORLD.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


def main(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "hook":
        wrapped = DistributedDataParallel(model, plan=PLAN)
        wrapped.register_comm_hook([], failing)
    else:
        collective = "ring" if kind == "thread" else "auto"
        plan = Plan(
            planner="made",
            buckets=tuple(
                Bucket(tensors=b.tensors, collective="ring" if kind == "thread" else "native")
                for b in PLAN.buckets
            ),
        )
        wrapped = DistributedDataParallel(
            model, plan=plan, collective=collective, timeline=kind != "thread"
        )
    for step in range(1, 9):
        loss = wrapped(torch.ones(2, 4)).sum()
        if step == BAD_STEP and dist.get_rank() == 1:
            model[0].weight.register_hook(lambda _: misbehave(kind))  # between the two buckets
        loss.backward()
    print("trained to the end", flush=True)  # noqa: T201


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=TIMEOUT)
    main(sys.argv[1])

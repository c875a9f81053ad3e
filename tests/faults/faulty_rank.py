"""A rank on which things go wrong, again and again: ``python faulty_rank.py FOLDER``.

It has imported what a training needs, and forks a process for each question that appears in the
folder; what becomes of that process is printed as a line of JSON. So a case takes as long as it
takes, and no time for imports; and the interpreter of each ends as that of a user's script does.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch._dynamo  # which a wrapper's constructor imports
import torch.distributed as dist
from torch import nn

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave.sparse.settings import GTopK

FAULTY_RANK = 1
TIMEOUT_S = 5.0
MOST_STEPS = 400
WIDTH = 64
POLLED_EVERY_S = 0.005
# A plan that is tried whatever is predicted, so that there is a stage in which one is.
QUICK = {"planner": "wfbp", "record_steps": 2, "trial_steps": 2}
WRAPPERS = {
    "dense": (DistributedDataParallel, {}),
    "gtopk": (DistributedDataParallel, {"compression": GTopK(density=0.01)}),
    "sharded": (ShardedDataParallel, {}),
}


class OnPurpose(Exception):
    """What a user's own code may raise."""


def main(folder):
    for number in count():
        question = asked(folder / f"{number}.json")
        if question is None:
            return
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            train(**question)
            return
        code = ended(child, folder / f"{number}.kill")
        tell(ended=number, exit_code=code, at_s=time.monotonic())


def asked(path):
    while not path.exists():
        time.sleep(POLLED_EVERY_S)
    return json.loads(path.read_text())


def ended(child, kill):
    """Its exit code, as a shell has it; one that has stopped is killed when that is asked for."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if kill.exists():
            os.kill(child, signal.SIGKILL)
        time.sleep(POLLED_EVERY_S)


def tell(**what):
    print(json.dumps(what), flush=True)  # noqa: T201


def train(*, case, wrapper, stage, port):
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    kind, options = WRAPPERS[wrapper]
    wrapped = kind(model, **QUICK, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.001)
    is_done = False
    for step in range(MOST_STEPS):
        is_now = not is_done and wrapped.findings().stage == stage
        is_done = is_done or is_now
        fault = case if is_now and dist.get_rank() == FAULTY_RANK else None
        if is_now and dist.get_rank() == FAULTY_RANK:
            tell(fault=case, step=step, at_s=time.monotonic())
        take_step(wrapped, model, optimizer, fault)
        if case == "link cut" and is_done:
            time.sleep(0.01)  # until it is cut: these steps are short
    tell(trained="to the end", stage=str(wrapped.findings().stage))


def take_step(wrapped, model, optimizer, fault):
    optimizer.zero_grad()
    if fault == "exception in forward":
        model[2].register_forward_pre_hook(lambda *_: on_purpose())
    if fault in IN_BACKWARD:
        model[2].weight.register_hook(lambda _: IN_BACKWARD[fault]())
    wrapped(torch.ones(2, WIDTH)).square().mean().backward()
    if fault == "exception before the optimizer's step":
        on_purpose()
    optimizer.step()


def on_purpose():
    raise OnPurpose("on purpose")


IN_BACKWARD = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception in backward": on_purpose,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))

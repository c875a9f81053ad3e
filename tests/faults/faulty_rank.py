"""A rank on which things go wrong, again and again: ``python faulty_rank.py FOLDER``.

It has imported what a training needs, and forks a process for each question that appears in the
folder; what becomes of that process is printed as a line of JSON. So a case takes as long as it
takes, and no time for imports; and the interpreter of each ends as that of a user's script does.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from datetime import timedelta
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import gettempdir

import torch
import torch._dynamo  # which a wrapper's constructor imports
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

from gradweave import DistributedDataParallel, ShardedDataParallel, TrainingState
from gradweave._src.sparse.settings import GTopK

FAULTY_RANK = 1
# Where the launcher is, and who keeps plans.
RANK_OF = {"launcher killed": 0, "disk full": 0}
TIMEOUT_S = 5.0
MOST_STEPS = 300
WIDTH = 64
POLLED_EVERY_S = 0.005
# After the fault steps take so long, so that there are some while a link is cut or slow.
LATER_STEP_S = 0.01
PR_SET_CHILD_SUBREAPER = 36
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
    adopt_orphans()
    for number in count():
        question = asked(folder / f"{number}.json")
        if question is None:
            return
        launcher = None
        if question["case"] == "launcher killed" and os.environ["RANK"] == "0":
            launcher = started_launcher(question["port"])
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            train(**question, launcher=launcher)
            return
        code = ended(child, folder / f"{number}.kill")
        ended_s = time.monotonic()
        if launcher is not None:
            os.kill(launcher, signal.SIGKILL)
            os.waitpid(launcher, 0)
        tell(ended=number, exit_code=code, at_s=ended_s, left=left_behind(question["port"]))


def adopt_orphans():
    """So that a process which a rank has left behind is found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def asked(path):
    while not path.exists():
        time.sleep(POLLED_EVERY_S)
    return json.loads(path.read_text())


def started_launcher(port):
    """The id of a process that hosts the store, as torchrun does."""
    child = os.fork()
    if not child:
        _store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=True, wait_for_workers=False)
        while True:
            signal.pause()
    return child


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


def left_behind(port):
    """Processes, and whoever listens where the store was."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = [f"process {Path('/proc', pid, 'comm').read_text().strip()}" for pid in listed]
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        found.append(f"port {port}: {error.strerror}")
    return found


def tell(**what):
    print(json.dumps(what), flush=True)  # noqa: T201


def train(*, case, wrapper, stage, port, launcher):
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(port)
    if case == "launcher killed":  # as torchrun tells its workers that it hosts the store
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    kind, options = WRAPPERS[wrapper]
    if case == "disk full":
        options = {**options, "cache": str(Path(gettempdir(), "plans"))}
    wrapped = kind(model, **QUICK, **options)
    optimizer = FailingSGD(wrapped.parameters(), lr=0.001)
    is_done = False
    for step in range(MOST_STEPS):
        is_now = not is_done and wrapped.findings().stage == stage
        is_done = is_done or is_now
        is_here = is_now and dist.get_rank() == RANK_OF.get(case, FAULTY_RANK)
        if is_here:
            tell(fault=case, step=step, at_s=time.monotonic())
        if is_here and case == "ends early":
            return
        if is_here and case == "launcher killed":
            os.kill(launcher, signal.SIGKILL)
        if is_here and case.startswith("disk full"):
            fill_disk()
        if is_now and case == "disk full at a checkpoint":
            TrainingState(wrapped, optimizer).save(Path(gettempdir(), "checkpoint"))
        take_step(wrapped, model, optimizer, case if is_here else None)
        if is_done:
            time.sleep(LATER_STEP_S)
    tell(trained="to the end", stage=str(wrapped.findings().stage), weights=digest(wrapped))


def fill_disk():
    """No file of this process can be longer than nothing; Python ignores the signal for that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def digest(wrapped):
    """Of all weights; ranks that have trained together have the same."""
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    parts = [parameter.detach().numpy().tobytes() for parameter in wrapped.module.parameters()]
    return sha256(b"".join(parts)).hexdigest()


class FailingSGD(torch.optim.SGD):
    """An optimizer that can be told to raise."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            on_purpose()
        return super().step(closure)


class FailingBackward(torch.autograd.Function):
    """Nothing in forward, an exception in backward."""

    @staticmethod
    def forward(_, value):
        return value.clone()

    @staticmethod
    def backward(_, gradient):
        del gradient
        on_purpose()


def take_step(wrapped, model, optimizer, fault):
    optimizer.zero_grad()
    if fault == "exception in forward":
        model[2].register_forward_pre_hook(lambda *_: on_purpose())
    if fault == "exception in backward":
        model[2].register_forward_pre_hook(lambda _, given: FailingBackward.apply(*given))
    if fault in IN_HOOK:
        model[2].weight.register_hook(lambda _: IN_HOOK[fault]())
    optimizer.fails = fault == "exception in the optimizer"
    wrapped(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()


def on_purpose():
    raise OnPurpose("on purpose")


# What happens in the middle of backward, between two gradients.
IN_HOOK = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception in a hook": on_purpose,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))

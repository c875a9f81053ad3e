"""How two ranks end when one of them does: ``python endings.py KIND``, with KIND of KINDS below.

With torch's wrapper, and with ours in each stage of planning, rank 1 ends while rank 0 goes on.
Prints an Ending for each as a line of JSON. Ranks are forked from this process, which has imported
what they need, and run to the end of this script, so that their interpreters end as those of users
do.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from side_by_side import QUICK, STAGES, stage_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel

# The moments at which rank 1 ends: the stage, and how many steps after it was seen.
MOMENTS = {
    "recording": ("recording", 0),
    "learning": ("learning", 1),
    "trying": ("trying", 1),
    "settled": ("settled", 5),
}
TORCHS = "torch's wrapper"
KINDS = ("ends", "raises", "is interrupted")
# torch's wrapper has no stages.
TORCHS_STEP = 20
# What both may take to train and to end; then they are killed.
MOST_S = 60.0
# So long that whoever waits for it, and not for a rank that is known to be gone, is killed.
GROUP_TIMEOUT = timedelta(seconds=10 * MOST_S)


@dataclass(frozen=True)
class Ending:
    """How both ranks ended: by themselves, or killed because they did not."""

    moment: str
    exits: list[int]


class Ended(Exception):
    """The user's own."""


def end(kind):
    if kind == "raises":
        raise Ended
    if kind == "is interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(MOST_S)  # where a signal meets Python


def train(moment, kind, rank):
    """Rank 0 would never end."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    is_torchs = moment == TORCHS
    wrapped = TorchDDP(model) if is_torchs else DistributedDataParallel(model, **QUICK)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    stage, later = (None, TORCHS_STEP) if is_torchs else MOMENTS[moment]
    steps_in_stage = 0
    while rank == 0 or not (steps_in_stage > later or has_passed(wrapped, stage)):
        steps_in_stage += is_torchs or stage_of(wrapped) == stage
        optimizer.zero_grad()
        wrapped(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
    end(kind)


def has_passed(wrapped, stage):
    """Stages may be shorter than what was to be waited for."""
    return stage is not None and STAGES.index(stage_of(wrapped)) > STAGES.index(stage)


def start(moment, kind, rank, store):
    """The rank's process; None in that process."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=GROUP_TIMEOUT
    )
    train(moment, kind, rank)
    return None


def ending(moment, children):
    """Wait for both ranks."""
    exits, deadline_s = {}, time.monotonic() + MOST_S
    while len(exits) < len(children) and time.monotonic() < deadline_s:
        time.sleep(0.01)
        for child in children:
            if child not in exits and (found := os.waitpid(child, os.WNOHANG))[0]:
                exits[child] = os.waitstatus_to_exitcode(found[1])
    for child in children:
        if child not in exits:
            os.kill(child, signal.SIGKILL)
            exits[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ending(moment, [exits[child] for child in children])


def main(kind):
    # Whoever starts us in the background may ignore it, and children would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for moment in (TORCHS, *MOMENTS, TORCHS):
        store = tempfile.mktemp()  # noqa: S306 ranks make it
        children = []
        for rank in range(2):
            started = start(moment, kind, rank, store)
            if started is None:
                return  # a rank that has trained to its end
            children.append(started)
        print(json.dumps(asdict(ending(moment, children))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])

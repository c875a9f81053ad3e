"""Running a program round by round, for backends that ignore tags.

NCCL matches messages between two ranks by their order alone, and a send and a receive that wait for
each other must be launched together. So all transfers of a round go out as one batch. On CUDA this
only enqueues work on the current stream, and so do the additions: nothing here blocks the host.

This path runs on gloo and on a simulated accelerator in our tests (docs/accelerators.md).
"""

from collections.abc import Iterable
from itertools import groupby

import torch.distributed as dist

from gradweave._src.collectives.program import Kind, Program
from gradweave._src.comm.channel import Call
from gradweave._src.comm.execute import Payload
from gradweave._src.device_order import Order, wait_for


def execute_by_rounds(program: Program, payload: Payload, call: Call) -> None:
    by_round = groupby(enumerate(program.steps), key=lambda placed: placed[1].round)
    for number, placed in by_round:
        places = [place for place, _ in placed]
        try:
            _run_round(program, places, payload, call.group)
        except RuntimeError as error:
            peers = sorted({program.steps[place].peer for place in places})
            raise call.failed(f"round {number}, exchanging with ranks {peers}", error) from error
    payload.finish()


def _run_round(
    program: Program, places: Iterable[int], payload: Payload, group: dist.ProcessGroup
) -> None:
    transfers, arrivals = [], []
    for place in places:
        step = program.steps[place]
        sends = step.kind is Kind.SEND
        message = payload.outgoing(place) if sends else payload.room(place)
        if not message.numel():
            continue
        does = dist.isend if sends else dist.irecv
        transfers.append(dist.P2POp(does, message, group=group, group_peer=step.peer))
        if not sends:
            arrivals.append((place, message))
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            wait_for(work, Order.LANE_AFTER_TRANSFERS)
    for place, message in arrivals:
        payload.arrived(place, message)

"""Running a program round by round, for backends that ignore tags.

NCCL matches messages between two ranks by their order alone, and a send and a receive that wait for
each other must be launched together. So all transfers of a round go out as one batch. On CUDA this
only enqueues work on the current stream, and so do the additions: nothing here blocks the host.

This path runs on gloo in our tests. On NCCL it has not been run: we have no GPU.
"""

from itertools import groupby

import torch
import torch.distributed as dist

from gradweave.collectives.program import Kind, Program
from gradweave.collectives.schedule import block_edges


def execute_by_rounds(program: Program, message: torch.Tensor, group: dist.ProcessGroup) -> None:
    edges = block_edges(message.numel(), program.blocks).tolist()
    for _, steps in groupby(program.steps, key=lambda step: step.round):
        transfers, additions = [], []
        for step in steps:
            view = message[edges[step.first] : edges[step.last]]
            if not view.numel():
                continue
            if step.kind is Kind.SEND:
                transfers.append(dist.P2POp(dist.isend, view, group=group, group_peer=step.peer))
                continue
            # What is replaced may also be sent in this round, so it arrives beside its place too.
            arrived = torch.empty_like(view)
            transfers.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=step.peer))
            additions.append((step.kind, view, arrived))
        if transfers:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        for kind, view, arrived in additions:
            view.add_(arrived) if kind is Kind.ADD else view.copy_(arrived)

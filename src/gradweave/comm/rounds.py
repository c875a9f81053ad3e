"""Running a program round by round, for backends that ignore tags.

NCCL matches messages between two ranks by their order alone, and a send and a receive that wait for
each other must be launched together. So all transfers of a round go out as one batch. On CUDA this
only enqueues work on the current stream, and so do the additions: nothing here blocks the host.

This path runs on gloo in our tests. On NCCL it has not been run: we have no GPU.
"""

from itertools import groupby

import torch
import torch.distributed as dist

from gradweave.collectives.program import Kind, Program, Step
from gradweave.collectives.schedule import block_edges
from gradweave.comm.execute import Call


def execute_by_rounds(program: Program, message: torch.Tensor, call: Call) -> None:
    edges = block_edges(message.numel(), program.blocks).tolist()
    for number, steps in groupby(program.steps, key=lambda step: step.round):
        present = [step for step in steps if edges[step.last] > edges[step.first]]
        try:
            _run_round(program, present, message, edges, call.group)
        except RuntimeError as error:
            peers = sorted({step.peer for step in present})
            raise call.failed(f"round {number}, exchanging with ranks {peers}", error) from error


def _run_round(
    program: Program,
    steps: list[Step],
    message: torch.Tensor,
    edges: list[int],
    group: dist.ProcessGroup,
) -> None:
    transfers, arrivals = [], []
    for step in steps:
        view = message[edges[step.first] : edges[step.last]]
        if step.kind is Kind.SEND:
            transfers.append(dist.P2POp(dist.isend, view, group=group, group_peer=step.peer))
            continue
        sent_too = any(program.steps[need].round == step.round for need in step.needs)
        arrived = torch.empty_like(view) if step.kind is Kind.ADD or sent_too else view
        transfers.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=step.peer))
        arrivals.append((step.kind, view, arrived))
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    for kind, view, arrived in arrivals:
        if arrived is not view:
            view.add_(arrived) if kind is Kind.ADD else view.copy_(arrived)

"""What each rank of ``gradweave bench collectives`` runs: ``python -m …collectives_job QUESTION``.

Rank 0 prints one line of JSON for each timing as it is ready.
"""

import os
import sys
from collections.abc import Iterator
from itertools import product

import msgspec
import torch
import torch.distributed as dist

from gradweave.collectives.topology import Topology, topology_of
from gradweave.comm import Communicator
from gradweave.comm.agree import gather_text, group_device
from gradweave.measure.collectives import time_collectives
from gradweave.measure.timings import Question, Timing


def answers(question: Question, group: dist.ProcessGroup) -> Iterator[Timing]:
    communicator = Communicator(group, topology=_topology(question, group), link=question.link)
    for operation, nbytes in product(question.operations, question.sizes):
        yield from time_collectives(
            communicator,
            operation=operation,
            algorithms=question.algorithms,
            nbytes=nbytes,
            repeats=question.repeats,
        )


def _topology(question: Question, group: dist.ProcessGroup) -> Topology:
    """Ranks by node, as the launcher numbers them, and nodes by rack where racks are known."""
    node = os.environ.get("GROUP_RANK", "0")
    nodes = [int(text) for text in gather_text(group, node, device=group_device(group))]
    if question.nodes_per_rack is None:
        return topology_of(nodes)
    return topology_of(nodes, [node // question.nodes_per_rack for node in nodes])


def in_default_group(question: Question) -> list[Timing]:
    """All of them, in the group that the environment describes, as torchrun sets it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # A list: what was built on the group must be gone before the group is.
    group = dist.group.WORLD
    assert group is not None
    timings = list(_shown(answers(question, group)))
    dist.destroy_process_group()
    return timings


def _shown(timings: Iterator[Timing]) -> Iterator[Timing]:
    for timing in timings:
        if dist.get_rank() == 0 and __name__ == "__main__":
            print(msgspec.json.encode(timing).decode(), flush=True)  # noqa: T201
        yield timing


if __name__ == "__main__":
    in_default_group(msgspec.json.decode(sys.argv[1], type=Question))

"""What each rank of ``gradweave bench collectives`` runs: ``python -m …collectives_job QUESTION``.

Rank 0 prints one line of JSON for each timing as it is ready.
"""

import os
import sys
from collections.abc import Callable, Iterator
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


def in_default_group(question: Question, *, on_timing: Callable[[Timing], None]) -> None:
    """In the group that the environment describes, as torchrun sets it; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for timing in answers(question, group):
        if group.rank() == 0:
            on_timing(timing)
    dist.destroy_process_group()


def _print_line(timing: Timing) -> None:
    print(msgspec.json.encode(timing).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    in_default_group(msgspec.json.decode(sys.argv[1], type=Question), on_timing=_print_line)

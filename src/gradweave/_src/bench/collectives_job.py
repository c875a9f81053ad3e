"""What each rank of ``gradweave bench collectives`` runs: ``python -m …collectives_job FILE``.

Rank 0 prints one line of JSON for each timing as it is ready.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch.distributed as dist

from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.ranks import default_group, node_topology
from gradweave._src.comm.communicator import Communicator
from gradweave._src.measure.collectives import time_collectives
from gradweave._src.measure.timings import Question, Timing


def answers(question: Question, group: dist.ProcessGroup) -> Iterator[Timing]:
    topology = node_topology(group, nodes_per_rack=question.nodes_per_rack)
    communicator = Communicator(group, topology=topology, link=question.link)
    for operation, nbytes in product(question.operations, question.sizes):
        yield from time_collectives(
            communicator,
            operation=operation,
            algorithms=question.algorithms,
            nbytes=nbytes,
            repeats=question.repeats,
        )


def in_default_group(question: Question, *, on_timing: Callable[[Timing], None]) -> None:
    """Time collectives in the group that the environment describes; rank 0 reports."""
    with default_group() as group:
        for timing in answers(question, group):
            if group.rank() == 0:
                on_timing(timing)


if __name__ == "__main__":
    in_default_group(asked(Question), on_timing=answer)

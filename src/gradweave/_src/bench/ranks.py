"""What every rank of an experiment begins and ends with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradweave._src.collectives.topology import Topology, topology_of
from gradweave._src.comm.small_messages import gather_text
from gradweave._src.errors import CollectiveError


@contextmanager
def default_group() -> Iterator[dist.ProcessGroup]:
    """Make torch's default group as the environment describes it, with one thread for each rank."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:  # of torch's store, or a variable is missing
        raise CollectiveError(_why_nobody_met(error)) from None
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()  # not after a failure: peers may be in a collective


def _why_nobody_met(error: Exception) -> str:
    """Say it in one line, for torch's error has the whole stack behind it."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error):
        return f"{where} is in use by another program; give torchrun another --master-port"
    said = str(error).strip().partition("\n")[0]
    return f"ranks have not met at {where}: {said}; `gradweave doctor` says what is in the way"


def node_numbers(group: dist.ProcessGroup) -> list[int]:
    """Return the node of each rank, as the launcher numbers them."""
    node = os.environ.get("GROUP_RANK", "0")
    return [int(text) for text in gather_text(group, node)]


def node_topology(group: dist.ProcessGroup, *, nodes_per_rack: int | None) -> Topology:
    """Group ranks by node, as the launcher numbers them, and nodes by rack if racks are known."""
    nodes = node_numbers(group)
    if nodes_per_rack is None:
        return topology_of(nodes)
    return topology_of(nodes, [node // nodes_per_rack for node in nodes])

"""The backend's own collectives, in the same place as ours: on a flat message, in place."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from gradweave._src.collectives.schedule import block_edges
from gradweave._src.device_order import Order, wait_for
from gradweave._src.torch_internals import HOST, gather_flat, scatter_flat
from gradweave._src.vocabulary import Operation


def all_reduce(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    del root
    wait_for(group.allreduce([message]), Order.ALL_REDUCED)


def broadcast(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    wait_for(group.broadcast([message], options), Order.BROADCAST)


def reduce(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    options = dist.ReduceOptions()
    options.rootRank = root
    wait_for(group.reduce([message], options), Order.REDUCED)


def reduce_scatter(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    """Leave the sum of block b of the message on rank b.

    gloo scatters blocks of any sizes, and others need equal ones, so uneven blocks are padded for
    them.
    """
    del root
    if message.numel() % group.size() == 0:
        own = message.view(group.size(), -1)[group.rank()]
        summed = torch.empty_like(own)
        wait_for(scatter_flat(group, summed, message), Order.REDUCE_SCATTERED)
        own.copy_(summed)
        return
    blocks = _blocks(message, group)
    own, largest = blocks[group.rank()], max(block.numel() for block in blocks)
    if message.device == HOST:
        group.reduce_scatter([own], [blocks]).wait()
        return
    padded = message.new_zeros(group.size(), largest)
    for block, row in zip(blocks, padded, strict=True):
        row[: block.numel()] = block
    mine = message.new_empty(largest)
    wait_for(scatter_flat(group, mine, padded.view(-1)), Order.PADDED_REDUCE_SCATTERED)
    own.copy_(mine[: own.numel()])


def all_gather(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    """Gather block b from rank b; uneven blocks are padded, for backends gather equal sizes."""
    del root
    edges = block_edges(message.numel(), group.size())
    first, last = int(edges[group.rank()]), int(edges[group.rank() + 1])
    longest = -(-message.numel() // group.size())
    if message.numel() == longest * group.size():
        wait_for(gather_flat(group, message, message[first:last].clone()), Order.ALL_GATHERED)
        return
    padded = message.new_zeros(group.size(), longest)
    mine = message.new_zeros(longest)
    mine[: last - first] = message[first:last]
    wait_for(gather_flat(group, padded.view(-1), mine), Order.PADDED_ALL_GATHERED)
    for block, row in zip(_blocks(message, group), padded, strict=True):
        block.copy_(row[: block.numel()])


def _blocks(message: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    sizes = np.diff(block_edges(message.numel(), group.size())).tolist()
    return list(torch.split(message, sizes))


NATIVE: Mapping[Operation, Callable[[torch.Tensor, dist.ProcessGroup, int], None]] = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
}

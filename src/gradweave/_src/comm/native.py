"""The backend's own collectives, in the same place as ours: on a flat message, in place."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from gradweave._src.collectives.schedule import block_edges
from gradweave._src.device_order import Order, wait_for
from gradweave._src.torch_internals import HOST
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
    """Block b of the message belongs to rank b. gloo scatters blocks of any sizes, and others need
    equal ones, so uneven blocks are padded for them.
    """
    del root
    blocks = _blocks(message, group)
    own, largest = blocks[group.rank()], max(block.numel() for block in blocks)
    if message.device == HOST or message.numel() == largest * group.size():
        wait_for(group.reduce_scatter([own], [blocks]), Order.REDUCE_SCATTERED)
        return
    padded = message.new_zeros(group.size(), largest)
    for block, row in zip(blocks, padded, strict=True):
        row[: block.numel()] = block
    mine = message.new_empty(largest)
    wait_for(group.reduce_scatter([mine], [list(padded)]), Order.PADDED_REDUCE_SCATTERED)
    own.copy_(mine[: own.numel()])


def all_gather(message: torch.Tensor, group: dist.ProcessGroup, root: int) -> None:
    """Block b belongs to rank b. Backends gather equal sizes, so uneven blocks are padded."""
    del root
    blocks = _blocks(message, group)
    largest = max(block.numel() for block in blocks)
    if message.numel() == largest * group.size():
        wait_for(group.allgather([blocks], [blocks[group.rank()].clone()]), Order.ALL_GATHERED)
        return
    padded = message.new_zeros(group.size(), largest)
    own = blocks[group.rank()]
    mine = message.new_zeros(largest)
    mine[: own.numel()] = own
    wait_for(group.allgather([list(padded)], [mine]), Order.PADDED_ALL_GATHERED)
    for block, row in zip(blocks, padded, strict=True):
        block.copy_(row[: block.numel()])


def _blocks(message: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    sizes = torch.as_tensor(block_edges(message.numel(), group.size())).diff().tolist()
    return list(torch.split(message, sizes))


NATIVE: Mapping[Operation, Callable[[torch.Tensor, dist.ProcessGroup, int], None]] = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
}

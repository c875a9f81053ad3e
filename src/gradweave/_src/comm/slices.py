"""A flat message as payloads: summed or replaced in place, one slice after the other.

The message itself is not copied: what is to be added arrives in scratch buffers of one slice each,
a dozen at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

import torch

from gradweave._src.collectives.program import Kind, Program
from gradweave._src.collectives.schedule import block_edges
from gradweave._src.comm.channel import MESSAGES
from gradweave._src.comm.execute import MOST_AT_ONCE

# A block is cut into as many slices as travel at once, unless they would be so small that calls
# cost more than overlap gains, or so large that scratch buffers would amount to a copy of the
# message.
LEAST_SLICE_BYTES = 128 * 1024
MOST_SLICE_BYTES = 2 * 1024 * 1024


@dataclass(slots=True)
class Scratch:
    """Buffers for what is to be added; they are kept, for fresh memory costs page faults."""

    free: list[torch.Tensor] = field(default_factory=list)

    def take(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer of at least this length; one that is too short is replaced."""
        kept = [buffer for buffer in self.free if (buffer.dtype, buffer.device) == (dtype, device)]
        large = next((buffer for buffer in kept if buffer.numel() >= numel), None)
        used = large if large is not None else next(iter(kept), None)
        self.free = [buffer for buffer in self.free if buffer is not used]
        return torch.empty(numel, dtype=dtype, device=device) if large is None else large

    def give_back(self, buffer: torch.Tensor) -> None:
        self.free.append(buffer)


class Slice:
    """The part of a message that goes through a program at once, in place."""

    copied = False

    def __init__(self, program: Program, views: list[torch.Tensor], scratch: Scratch) -> None:
        self._steps, self._views, self._scratch = program.steps, views, scratch
        self._borrowed: dict[int, torch.Tensor] = {}

    def outgoing(self, place: int) -> torch.Tensor:
        return self._views[place]

    def room(self, place: int) -> torch.Tensor:
        view = self._views[place]
        if not self._steps[place].beside:
            return view
        buffer = self._borrowed[place] = self._scratch.take(
            view.numel(), dtype=view.dtype, device=view.device
        )
        return buffer[: view.numel()]

    def arrived(self, place: int, message: torch.Tensor) -> None:
        buffer = self._borrowed.pop(place, None)
        if buffer is None:
            return
        view = self._views[place]
        view.add_(message) if self._steps[place].kind is Kind.ADD else view.copy_(message)
        self._scratch.give_back(buffer)

    def finish(self) -> None:
        """Do nothing: everything is in place."""


def slices_for(nbytes: int, program: Program, *, owned: bool) -> int:
    """Return how many slices pay, the same number on every rank.

    ``owned`` says that ranks own blocks, so that it matters which part of a message is which.
    """
    if owned and not program.block_by_block:
        return 1
    block_bytes = nbytes // program.blocks
    wanted = min(MOST_AT_ONCE, block_bytes // LEAST_SLICE_BYTES)
    needed = ceil(block_bytes / MOST_SLICE_BYTES)
    return max(1, min(max(wanted, needed), MESSAGES // (1 + program.most_steps)))


def cut(
    message: torch.Tensor, program: Program, *, scratch: Scratch, slices: int = 1
) -> Iterator[Slice]:
    """Yield so many slices of a flat, contiguous message.

    A slice is a part of every block. Where steps take several blocks at once, such parts would not
    be in one piece, so there a slice is a part of the message, cut into blocks of its own.
    """
    if not program.block_by_block:
        for part in message.tensor_split(slices):
            edges = block_edges(part.numel(), program.blocks).tolist()
            views = [part[edges[step.first] : edges[step.last]] for step in program.steps]
            yield Slice(program, views, scratch)
        return
    edges = block_edges(message.numel(), program.blocks).tolist()
    for number in range(slices):
        views = [
            message[edges[step.first] : edges[step.last]].tensor_split(slices)[number]
            for step in program.steps
        ]
        yield Slice(program, views, scratch)

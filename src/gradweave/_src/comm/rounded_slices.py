"""A flat float32 message as payloads whose parts are rounded while they travel.

A block is rounded when it is sent for the first time after a change, and what arrives is added in
float32: one rounding for each hop of a sum. What replaces a block is passed on as it came. A rank
that sends a block and keeps using it uses the values that others have received, and blocks that
nobody has sent are rounded in the end. So all ranks end with the same bits, whatever the algorithm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from gradweave._src.collectives.program import Kind, Program
from gradweave._src.collectives.schedule import block_edges
from gradweave._src.comm.rounding import WireFormat
from gradweave._src.comm.slices import Scratch


@dataclass(frozen=True, slots=True)
class RoundingMemory:
    """Buffers kept between calls: for whole slices as sent, and for what arrives beside them."""

    sent: Scratch = field(default_factory=Scratch)
    arriving: Scratch = field(default_factory=Scratch)


class RoundedSlice:
    """A part of a message that goes through a program at once.

    ``blocks`` are its values in float32, block by block, and ``dropped`` where what their rounding
    drops is added.
    """

    copied = False

    def __init__(
        self,
        program: Program,
        blocks: Sequence[torch.Tensor],
        wire_format: WireFormat,
        memory: RoundingMemory,
        dropped: Sequence[torch.Tensor] | None,
    ) -> None:
        self._steps, self._blocks, self._format = program.steps, blocks, wire_format
        self._dropped, self._memory = dropped, memory
        sizes = [wire_format.nbytes(block.numel()) for block in blocks]
        self._edges = [0, *accumulate(sizes)]
        self._arriving: dict[int, torch.Tensor] = {}
        self._sent = self._take(memory.sent, self._edges[-1])
        # Of each block: whether its bytes are those of its values, and its values those of its
        # bytes.
        self._is_encoded = [False] * len(blocks)
        self._is_rounded = [False] * len(blocks)

    def outgoing(self, place: int) -> torch.Tensor:
        step = self._steps[place]
        for block in range(step.first, step.last):
            self._encode(block)
        return self._bytes(place)

    def room(self, place: int) -> torch.Tensor:
        in_place = self._bytes(place)
        if not self._steps[place].beside:
            return in_place
        buffer = self._arriving[place] = self._take(self._memory.arriving, in_place.numel())
        return buffer[: in_place.numel()]

    def arrived(self, place: int, message: torch.Tensor) -> None:
        step = self._steps[place]
        start = self._edges[step.first]
        for block in range(step.first, step.last):
            part = message[self._edges[block] - start : self._edges[block + 1] - start]
            if step.kind is Kind.ADD:
                self._add(block, part)
            else:
                self._replace(block, part, is_in_place=place not in self._arriving)
        if place in self._arriving:
            self._memory.arriving.give_back(self._arriving.pop(place))

    def finish(self) -> None:
        for block in range(len(self._blocks)):
            self._encode(block)
            self._round(block)
        self._memory.sent.give_back(self._sent)

    def _take(self, scratch: Scratch, nbytes: int) -> torch.Tensor:
        return scratch.take(nbytes, dtype=torch.uint8, device=self._blocks[0].device)

    def _bytes(self, place: int) -> torch.Tensor:
        step = self._steps[place]
        return self._sent[self._edges[step.first] : self._edges[step.last]]

    def _bytes_of(self, block: int) -> torch.Tensor:
        return self._sent[self._edges[block] : self._edges[block + 1]]

    def _encode(self, block: int) -> None:
        if not self._is_encoded[block]:
            dropped = None if self._dropped is None else self._dropped[block]
            self._format.encode(self._blocks[block], self._bytes_of(block), dropped=dropped)
            self._is_encoded[block] = True

    def _round(self, block: int) -> None:
        """Replace a block's values by what its bytes say, so that all ranks have the same."""
        if self._is_encoded[block] and not self._is_rounded[block]:
            self._format.decode(self._bytes_of(block), self._blocks[block])
            self._is_rounded[block] = True

    def _add(self, block: int, message: torch.Tensor) -> None:
        self._round(block)
        self._format.add(message, self._blocks[block])
        self._is_encoded[block] = self._is_rounded[block] = False

    def _replace(self, block: int, message: torch.Tensor, *, is_in_place: bool) -> None:
        if not is_in_place:
            self._bytes_of(block).copy_(message)
        self._is_encoded[block], self._is_rounded[block] = True, False
        self._round(block)


def cut_rounded(
    message: torch.Tensor,
    program: Program,
    *,
    wire_format: WireFormat,
    memory: RoundingMemory,
    dropped: torch.Tensor | None,
    slices: int = 1,
) -> Iterator[RoundedSlice]:
    """Yield so many slices of a flat, contiguous message, cut as ``slices.cut`` cuts it."""
    of_message = _blocks_of_slices(message, program, slices)
    of_dropped = None if dropped is None else _blocks_of_slices(dropped, program, slices)
    for number, blocks in enumerate(of_message):
        kept = None if of_dropped is None else of_dropped[number]
        yield RoundedSlice(program, blocks, wire_format, memory, kept)


def _blocks_of_slices(
    message: torch.Tensor, program: Program, slices: int
) -> list[list[torch.Tensor]]:
    if not program.block_by_block:
        return [_blocks(part, program.blocks) for part in message.tensor_split(slices)]
    parts = [block.tensor_split(slices) for block in _blocks(message, program.blocks)]
    return [[of_block[number] for of_block in parts] for number in range(slices)]


def _blocks(message: torch.Tensor, count: int) -> list[torch.Tensor]:
    edges = block_edges(message.numel(), count).tolist()
    return [message[first:last] for first, last in pairwise(edges)]

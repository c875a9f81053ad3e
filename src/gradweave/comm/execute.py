"""Running a program on a process group's point-to-point operations, in place.

Sends leave as soon as what they need is there, receives are posted before they are needed, and the
message goes through the program in slices, a few at a time, so that one is added while another one
travels. The message itself is not copied: what is to be added arrives in scratch buffers of one
slice each, a dozen at most.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from zlib import crc32

import torch
import torch.distributed as dist

from gradweave.collectives.program import Kind, Program, Step
from gradweave.collectives.schedule import block_edges
from gradweave.errors import CollectiveError

# Receives posted beyond the round that is waited for. gloo moves a message only when both sides
# have posted it; with two in advance a link never waits for us.
POSTED_AHEAD = 2

# Slices on their way at once.
MOST_LANES = 4
# A block is cut into that many, unless they would be so small that calls cost more than overlap
# gains, or so large that scratch buffers would amount to a copy of the message.
LEAST_SLICE_BYTES = 128 * 1024
MOST_SLICE_BYTES = 2 * 1024 * 1024

# A tag has 31 bits: the lower ones tell the messages of a collective apart, the upper ones
# collectives, so that ranks that are out of step never take each other's data.
MESSAGES = 1 << 20
CALLS = 1 << 11


def slices_for(message: torch.Tensor, program: Program, *, owned: bool) -> int:
    """How many slices pay. ``owned``: it matters which part of the message is which block."""
    if owned and not program.block_by_block:
        return 1
    block_bytes = message.numel() * message.element_size() // program.blocks
    wanted = min(MOST_LANES, block_bytes // LEAST_SLICE_BYTES)
    needed = ceil(block_bytes / MOST_SLICE_BYTES)
    return max(1, min(max(wanted, needed), MESSAGES // (1 + len(program.steps))))


@dataclass(slots=True)
class Scratch:
    """Buffers for what is to be added, kept between calls: fresh memory costs page faults."""

    free: list[torch.Tensor] = field(default_factory=list)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer of this size; one that is too small makes way for a larger one."""
        kept = [b for b in self.free if (b.dtype, b.device) == (like.dtype, like.device)]
        large = next((buffer for buffer in kept if buffer.numel() >= like.numel()), None)
        used = large if large is not None else next(iter(kept), None)
        self.free = [buffer for buffer in self.free if buffer is not used]
        return torch.empty_like(like) if large is None else large

    def give_back(self, buffer: torch.Tensor) -> None:
        self.free.append(buffer)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective on one group: what errors call it, and what its tags begin with."""

    group: dist.ProcessGroup
    what: str
    kind: str  # what all ranks must agree on
    number: int  # of the calls on this group, the same on every rank

    @property
    def salt(self) -> int:
        return crc32(f"{self.kind} {self.number}".encode()) % CALLS * MESSAGES

    def failed(self, doing: str, error: RuntimeError) -> CollectiveError:
        reason = str(error).split("] ", 1)[-1].partition("\n")[0]  # without gloo's source path
        return CollectiveError(f"{self.what} on rank {self.group.rank()}: {doing} failed: {reason}")


def execute(
    program: Program, message: torch.Tensor, call: Call, *, scratch: Scratch, slices: int
) -> None:
    """Run ``program`` on a flat, contiguous ``message``."""
    lanes = (
        _Lane(program, views, _Link(call, number, slices), scratch)
        for number, views in enumerate(_views(program, message, slices))
    )
    active = deque(islice(lanes, MOST_LANES))
    for lane in active:
        lane.begin()
    # The lanes take turns, one receive each: while one adds, the others' messages travel.
    while active:
        lane = active.popleft()
        if lane.take_next():
            active.append(lane)
            continue
        lane.finish()
        for following in islice(lanes, 1):
            following.begin()
            active.append(following)


def _views(program: Program, message: torch.Tensor, slices: int) -> Iterator[list[torch.Tensor]]:
    """For each slice, what each step sends or receives.

    A slice is a part of every block. Where steps take several blocks at once, such parts would not
    be in one piece, so there a slice is a part of the message, cut into blocks of its own.
    """
    if not program.block_by_block:
        for part in message.tensor_split(slices):
            edges = block_edges(part.numel(), program.blocks).tolist()
            yield [part[edges[step.first] : edges[step.last]] for step in program.steps]
        return
    edges = block_edges(message.numel(), program.blocks).tolist()
    for number in range(slices):
        yield [
            message[edges[step.first] : edges[step.last]].tensor_split(slices)[number]
            for step in program.steps
        ]


@dataclass(frozen=True, slots=True)
class _Link:
    """A call as one lane sees it: its own tags, and errors that say what was going on."""

    call: Call
    lane: int
    lanes: int

    def send(self, step: Step, view: torch.Tensor) -> dist.Work | None:
        if not view.numel():
            return None
        try:
            return self.call.group.send([view], step.peer, self._tag(step))
        except RuntimeError as error:
            raise self.call.failed(_described(step), error) from error

    def receive(self, step: Step, into: torch.Tensor) -> dist.Work | None:
        if not into.numel():
            return None
        try:
            return self.call.group.recv([into], step.peer, self._tag(step))
        except RuntimeError as error:
            raise self.call.failed(_described(step), error) from error

    def wait(self, step: Step, work: dist.Work | None) -> None:
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self.call.failed(_described(step), error) from error

    def _tag(self, step: Step) -> int:
        return self.call.salt + (step.ordinal * self.lanes + self.lane) % MESSAGES


def _described(step: Step) -> str:
    doing = "sending to" if step.kind is Kind.SEND else "receiving from"
    return f"round {step.round}, {doing} rank {step.peer}"


class _Lane:
    """One slice's way through the program."""

    def __init__(
        self, program: Program, views: list[torch.Tensor], link: _Link, scratch: Scratch
    ) -> None:
        self.steps, self.views, self.link, self.scratch = program.steps, views, link, scratch
        self.unmet = [len(step.needs) for step in program.steps]
        self.waiting_for = program.waiting_for
        self.to_post, self.to_take = deque(program.receives), deque(program.receives)
        self.sending: dict[int, dist.Work | None] = {}
        self.arriving: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}
        self.round = -1  # of the receive taken last

    def begin(self) -> None:
        for place, step in enumerate(self.steps):
            if step.kind is Kind.SEND and not self.unmet[place]:
                self._send(place)
        self._post_ahead()

    def take_next(self) -> bool:
        """Wait for the next receive, use it, send what waited for it; False: nothing is left."""
        if not self.to_take:
            return False
        place = self.to_take.popleft()
        if place not in self.arriving:
            self._post(self.to_post.popleft())
        work, buffer = self.arriving.pop(place)
        step, view = self.steps[place], self.views[place]
        self.link.wait(step, work)
        if buffer is not view:
            self._finish_sends(place)
            arrived = buffer[: view.numel()]
            view.add_(arrived) if step.kind is Kind.ADD else view.copy_(arrived)
            self.scratch.give_back(buffer)
        self.round = step.round
        for waiting in self.waiting_for[place]:
            self.unmet[waiting] -= 1
            if not self.unmet[waiting]:
                self._send(waiting)
        self._post_ahead()
        return True

    def finish(self) -> None:
        for place in list(self.sending):
            self._finish_send(place)

    def _post_ahead(self) -> None:
        while self.to_post:
            # What belongs to the round that is waited for must be posted, or two ranks could wait
            # for each other's posts.
            due = self.steps[self.to_post[0]].round <= self.steps[self.to_take[0]].round
            room = len(self.arriving) <= POSTED_AHEAD
            if not due and not (room and self._may_be_posted(self.to_post[0])):
                return
            self._post(self.to_post.popleft())

    def _may_be_posted(self, place: int) -> bool:
        """Whether what it would overwrite left in an earlier round, so that waiting is short."""
        return self._arrives_beside(place) or all(
            self.steps[need].round < self.round for need in self.steps[place].needs
        )

    def _arrives_beside(self, place: int) -> bool:
        """Whether it needs scratch: to be added, or because its place is sent in the same round."""
        step = self.steps[place]
        return step.kind is Kind.ADD or any(
            self.steps[need].round == step.round for need in step.needs
        )

    def _post(self, place: int) -> None:
        view = self.views[place]
        if self._arrives_beside(place):
            buffer = self.scratch.take(view)
        else:
            self._finish_sends(place)
            buffer = view
        work = self.link.receive(self.steps[place], buffer[: view.numel()])
        self.arriving[place] = (work, buffer)

    def _send(self, place: int) -> None:
        self.sending[place] = self.link.send(self.steps[place], self.views[place])

    def _finish_sends(self, place: int) -> None:
        """Until what the step is about to overwrite has left."""
        for need in self.steps[place].needs:
            self._finish_send(need)

    def _finish_send(self, place: int) -> None:
        self.link.wait(self.steps[place], self.sending.pop(place, None))

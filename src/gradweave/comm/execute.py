"""Running a program on a process group's point-to-point operations, in place.

Sends leave as soon as what they need is there, receives are posted before they are needed, and the
program runs on several slices of the message side by side (*lanes*), so that one slice is added
while another one travels. Of the message itself nothing is copied; what is to be added arrives in a
few scratch buffers.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gradweave.collectives.program import Kind, Program
from gradweave.collectives.schedule import block_edges
from gradweave.errors import CollectiveError

# Receives posted beyond the one that is waited for. gloo moves a message only when both sides have
# posted it; with two in advance a link never waits for us.
POSTED_AHEAD = 2

# Slices smaller than this cost more in calls than their overlap gains.
LEAST_SLICE_BYTES = 128 * 1024
MOST_LANES = 4


def lanes_for(message: torch.Tensor, program: Program, *, owned: bool) -> int:
    """How many slices pay. ``owned``: it matters which part of the message is which block."""
    if owned and not program.block_by_block:
        return 1
    block_bytes = message.numel() * message.element_size() // program.blocks
    return max(1, min(MOST_LANES, block_bytes // LEAST_SLICE_BYTES))


def _slices(program: Program, message: torch.Tensor, lanes: int) -> list[list[torch.Tensor]]:
    """For each lane, what each step sends or receives.

    A lane takes its slice of every block. Where steps take several blocks at once, these slices
    would not be in one piece, so a lane takes a slice of the message and cuts that into blocks.
    """
    if program.block_by_block:
        edges = block_edges(message.numel(), program.blocks).tolist()
        whole = [message[edges[step.first] : edges[step.last]] for step in program.steps]
        split = [view.tensor_split(lanes) for view in whole]
        return [[views[lane] for views in split] for lane in range(lanes)]
    parts = message.tensor_split(lanes)
    cuts = [block_edges(part.numel(), program.blocks).tolist() for part in parts]
    return [
        [part[edges[step.first] : edges[step.last]] for step in program.steps]
        for part, edges in zip(parts, cuts, strict=True)
    ]


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


def execute(
    program: Program,
    message: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    what: str,
    scratch: Scratch,
    lanes: int,
) -> None:
    """Run ``program`` on a flat, contiguous ``message``; ``what`` names it in errors."""
    slices = _slices(program, message, lanes)
    runs = [
        _Lane(program, views, _Link(group, what, lane, len(slices)), scratch)
        for lane, views in enumerate(slices)
    ]
    for run in runs:
        run.begin()
    # The lanes take turns, one receive each: while one adds, the others' messages travel.
    unfinished = deque(runs)
    while unfinished:
        run = unfinished.popleft()
        if run.take_next():
            unfinished.append(run)
    for run in runs:
        run.finish()


@dataclass(frozen=True, slots=True)
class _Link:
    """The group as one lane sees it: its own tags, and errors that say what was going on."""

    group: dist.ProcessGroup
    what: str
    lane: int
    lanes: int

    def tag(self, message: int) -> int:
        return message * self.lanes + self.lane

    def wait(self, work: dist.Work, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.what} on rank {self.group.rank()}: {doing} failed: {_reason(error)}"
            ) from error


class _Lane:
    """One slice's way through the program."""

    def __init__(
        self, program: Program, views: list[torch.Tensor], link: _Link, scratch: Scratch
    ) -> None:
        self.steps, self.link, self.scratch = program.steps, link, scratch
        self.views = views
        self.unmet = [len(step.needs) for step in program.steps]
        self.waiting_for = program.waiting_for
        self.to_post, self.to_take = deque(program.receives), deque(program.receives)
        self.sending: dict[int, dist.Work | None] = {}
        self.round = 0  # of the receive taken last
        self.arriving: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}

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
        step = self.steps[place]
        if work is not None:
            self.link.wait(work, f"round {step.round}, receiving from rank {step.peer}")
        if step.kind is Kind.ADD:
            self._finish_sends(place)
            self.views[place].add_(buffer[: self.views[place].numel()])
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
        while self.to_post and len(self.arriving) <= POSTED_AHEAD:
            if not self._may_be_posted(self.to_post[0]):
                return
            self._post(self.to_post.popleft())

    def _may_be_posted(self, place: int) -> bool:
        """Whether what it would overwrite has left, or left so long ago that waiting is short."""
        step = self.steps[place]
        if step.kind is Kind.ADD:
            return True
        return all(self.steps[need].round < self.round for need in step.needs)

    def _post(self, place: int) -> None:
        step, view = self.steps[place], self.views[place]
        if step.kind is Kind.REPLACE:
            self._finish_sends(place)
            buffer = view
        else:
            buffer = self.scratch.take(view)
        work = None
        if view.numel():
            tag = self.link.tag(step.message)
            work = self.link.group.recv([buffer[: view.numel()]], step.peer, tag)
        self.arriving[place] = (work, buffer)

    def _send(self, place: int) -> None:
        step, view = self.steps[place], self.views[place]
        work = None
        if view.numel():
            work = self.link.group.send([view], step.peer, self.link.tag(step.message))
        self.sending[place] = work

    def _finish_sends(self, place: int) -> None:
        """Until what the step is about to overwrite has left."""
        for need in self.steps[place].needs:
            self._finish_send(need)

    def _finish_send(self, place: int) -> None:
        work = self.sending.pop(place, None)
        if work is not None:
            step = self.steps[place]
            self.link.wait(work, f"round {step.round}, sending to rank {step.peer}")


def _reason(error: RuntimeError) -> str:
    """gloo's message without the path of its source file."""
    return str(error).split("] ", 1)[-1].splitlines()[0]

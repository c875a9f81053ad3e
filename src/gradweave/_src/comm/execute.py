"""Running a program on a process group's point-to-point operations.

Sends leave as soon as what they need is there, and receives are posted before they are needed. What
travels, and what is done with it on arrival, is the caller's business: a ``Payload``. Several go
through the program at once, so that one is added while another travels.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist

from gradweave._src.collectives.program import Kind, Program
from gradweave._src.comm.channel import Call, Channel

# So many receives are posted beyond the round that is waited for. gloo moves a message only when
# both sides have posted it; with two in advance a connection never waits for us.
POSTED_AHEAD = 2

# So many payloads are on their way at once.
MOST_AT_ONCE = 4


class Payload(Protocol):
    """What goes through a program once. Steps are named by their place in the program."""

    @property
    def copied(self) -> bool:
        """Whether every message has memory of its own.

        If so, all receives are posted at once, and none waits for a send to leave. Otherwise
        messages are parts of what the program works on: a receive waits for the sends it ``needs``.
        """
        ...

    def outgoing(self, place: int, /) -> torch.Tensor:
        """Return what a send takes along."""
        ...

    def room(self, place: int, /) -> torch.Tensor:
        """Return where a receive is to arrive: in place only if the step allows that."""
        ...

    def arrived(self, place: int, message: torch.Tensor, /) -> None:
        """Use a message that has arrived in its room: add it, keep it, merge it."""
        ...

    def finish(self) -> None:
        """Finish the payload when everything has arrived and has left."""
        ...


def execute(program: Program, payloads: Iterable[Payload], call: Call, *, count: int = 1) -> None:
    """Take so many payloads through ``program``: equally many, in the same order, on every rank."""
    walks = (
        _Walk(program, payload, Channel(call, number, count))
        for number, payload in enumerate(payloads)
    )
    active = deque(islice(walks, MOST_AT_ONCE))
    for walk in active:
        walk.begin()
    # Payloads take turns, one receive each: while one adds, the others' messages travel.
    while active:
        walk = active.popleft()
        if walk.take_next():
            active.append(walk)
            continue
        walk.finish()
        for following in islice(walks, 1):
            following.begin()
            active.append(following)


class _Walk:
    """A payload that makes its way through the program."""

    def __init__(self, program: Program, payload: Payload, channel: Channel) -> None:
        self.steps, self.payload, self.channel = program.steps, payload, channel
        self.copied = payload.copied
        self.unmet = [len(step.needs) for step in program.steps]
        self.waiting_for = program.waiting_for
        self.to_post, self.to_take = deque(program.receives), deque(program.receives)
        self.sending: dict[int, dist.Work | None] = {}
        self.arriving: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}
        self.round = -1  # of the last receive that was taken

    def begin(self) -> None:
        if self.copied:
            self._post_ahead()  # before anything is packed
        for place, step in enumerate(self.steps):
            if step.kind is Kind.SEND and not self.unmet[place]:
                self._send(place)
        self._post_ahead()

    def take_next(self) -> bool:
        """Wait for the next receive, use it, send what waited for it; False if nothing is left."""
        if not self.to_take:
            return False
        place = self.to_take.popleft()
        if place not in self.arriving:
            self._post(self.to_post.popleft())
        work, message = self.arriving.pop(place)
        step = self.steps[place]
        self.channel.wait(step, work)
        if step.beside:
            self._finish_sends(place)
        self.payload.arrived(place, message)
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
        self.payload.finish()

    def _post_ahead(self) -> None:
        while self.to_post:
            # What belongs to the round that is waited for must be posted, or two ranks could wait
            # for each other's posts.
            due = self.steps[self.to_post[0]].round <= self.steps[self.to_take[0]].round
            if not due and not self._may_be_posted(self.to_post[0]):
                return
            self._post(self.to_post.popleft())

    def _may_be_posted(self, place: int) -> bool:
        """Return whether there is room, and whether what it overwrites left in an earlier round."""
        if self.copied:
            return True
        step = self.steps[place]
        return len(self.arriving) <= POSTED_AHEAD and (
            step.beside or all(self.steps[need].round < self.round for need in step.needs)
        )

    def _post(self, place: int) -> None:
        step = self.steps[place]
        if not step.beside:
            self._finish_sends(place)
        room = self.payload.room(place)
        self.arriving[place] = (self.channel.receive(step, room), room)

    def _send(self, place: int) -> None:
        message = self.payload.outgoing(place)
        self.sending[place] = self.channel.send(self.steps[place], message)

    def _finish_sends(self, place: int) -> None:
        """Wait until what the step is about to overwrite has left."""
        if self.copied:
            return
        for need in self.steps[place].needs:
            self._finish_send(need)

    def _finish_send(self, place: int) -> None:
        self.channel.wait(self.steps[place], self.sending.pop(place, None))

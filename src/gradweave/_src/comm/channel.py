"""Messages from rank to rank: their tags, and what to say when they fail."""

from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist

from gradweave._src.collectives.program import Kind, Step
from gradweave._src.comm.small_messages import FIRST_TAG
from gradweave._src.errors import CollectiveError

# A tag has 31 bits: the lower ones tell apart the messages of a collective, the upper ones the
# collectives, so that ranks that are out of step never take each other's data.
MESSAGES = 1 << 20
# Calls may be on a user's group, so their tags begin behind those of small messages, which begin
# behind the user's.
FIRST_CALL, CALLS = FIRST_TAG // MESSAGES + 1, 1 << 11


@dataclass(frozen=True, slots=True)
class Call:
    """One collective on one group: how errors name it, and what its tags begin with."""

    group: dist.ProcessGroup
    what: str
    kind: str  # what all ranks must agree on
    number: int  # of the calls on this group, the same on every rank

    @property
    def salt(self) -> int:
        name = f"{self.kind} {self.number}".encode()
        return (FIRST_CALL + crc32(name) % (CALLS - FIRST_CALL)) * MESSAGES

    def failed(self, doing: str, error: RuntimeError) -> CollectiveError:
        reason = str(error).split("] ", 1)[-1].partition("\n")[0]  # without gloo's source path
        return CollectiveError(f"{self.what} on rank {self.group.rank()}: {doing} failed: {reason}")


class Channel:
    """The messages of one payload of a call, which do not meet those of its other payloads."""

    def __init__(self, call: Call, payload: int, payloads: int) -> None:
        self.call, self.payload, self.payloads = call, payload, payloads
        self._salt = call.salt

    def send(self, step: Step, message: torch.Tensor) -> dist.Work | None:
        """Begin to send a message; return None for an empty one, which does not travel."""
        if not message.numel():
            return None
        try:
            return self.call.group.send([message], step.peer, self._tag(step))
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
        return self._salt + (step.ordinal * self.payloads + self.payload) % MESSAGES


def _described(step: Step) -> str:
    doing = "sending to" if step.kind is Kind.SEND else "receiving from"
    return f"round {step.round}, {doing} rank {step.peer}"

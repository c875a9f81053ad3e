"""Exchanges on a process group."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradweave._src.collectives.program import Program, Step, program
from gradweave._src.comm.channel import Call
from gradweave._src.comm.execute import execute
from gradweave._src.comm.same_calls import SameCalls
from gradweave._src.errors import RequestError
from gradweave._src.sparse.exchange import Exchanged, Participant, find_exchange
from gradweave._src.sparse.vectors import SparseVector, index_type, message_bytes, pack, unpack


class Exchanger:
    """Runs exchanges, on every rank in the same order.

    The group must not be used for anything else meanwhile. It must be one of gloo's, also for a
    model on an accelerator: what is selected is small, and is merged on the host.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if group.name() != "gloo":
            raise RequestError(
                f"sparse exchanges go through the host's memory, not through {group.name()}; make "
                'a group for them with new_group(backend="gloo")'
            )
        self.group = group
        self._same_calls = SameCalls(group)
        self._calls = 0
        self._programs: dict[str, Program] = {}  # by exchange

    def start_sum(self, message: torch.Tensor) -> Callable[[], None]:
        """Begin to sum a flat tensor over the ranks, in place, by gloo; call the result to wait."""
        kind = f"sum, {message.dtype}, {message.numel()} elements"
        call = Call(self.group, "sum", kind, self._calls)
        self._calls += 1
        self._same_calls.check(call)
        work = self.group.allreduce([message])

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise call.failed("gloo's own all-reduce", error) from error

        return wait

    def run(self, mine: SparseVector, *, exchange: str, k: int, numel: int) -> Exchanged:
        """Exchange at most k of ``numel`` elements; both must be the same on every rank."""
        if len(mine) > k:
            raise ValueError(f"a message has room for {k} elements, got {len(mine)}")
        values = mine.values.dtype
        participant = find_exchange(exchange).participant(self.group.rank(), mine, k)
        kind = f"{exchange}, {values.type.__name__}, {k} of {numel} elements"
        call = Call(self.group, exchange, kind, self._calls)
        self._calls += 1
        self._same_calls.check(call)
        steps = self._program(exchange)
        packed = _Packed(steps, participant, k=k, values=values, indices=index_type(numel))
        execute(steps, [packed], call)
        return participant.result()

    def _program(self, exchange: str) -> Program:
        if exchange not in self._programs:
            schedule = find_exchange(exchange).schedule(self.group.size())
            self._programs[exchange] = program(schedule, self.group.rank())
        return self._programs[exchange]


class _Packed:
    """What a participant sends and receives: the vectors of a step, packed into one message."""

    copied = True

    def __init__(
        self,
        steps: Program,
        participant: Participant,
        *,
        k: int,
        values: np.dtype[Any],
        indices: np.dtype[Any],
    ) -> None:
        self._steps, self._participant = steps.steps, participant
        self._values, self._indices = values, indices
        self._vector_bytes = message_bytes(k, values, indices)

    def outgoing(self, place: int) -> torch.Tensor:
        step = self._steps[place]
        message = self._message(step)
        vectors = self._participant.outgoing(step)
        for part, vector in zip(self._parts(message), vectors, strict=True):
            pack(vector, part)
        return torch.from_numpy(message)

    def room(self, place: int) -> torch.Tensor:
        return torch.from_numpy(self._message(self._steps[place]))

    def arrived(self, place: int, message: torch.Tensor) -> None:
        vectors = [
            unpack(part, self._values, self._indices) for part in self._parts(message.numpy())
        ]
        self._participant.arrived(self._steps[place], vectors)

    def finish(self) -> None:
        """Do nothing: the participant has all of it."""

    def _message(self, step: Step) -> NDArray[np.uint8]:
        return np.zeros((step.last - step.first) * self._vector_bytes, np.uint8)

    def _parts(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the message as rows, one for each vector."""
        return message.reshape(-1, self._vector_bytes)

"""Exchanges on a process group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradweave.comm.agreement import Agreement
from gradweave.comm.execute import Call
from gradweave.errors import RequestError
from gradweave.sparse.exchange import Exchanged, find_exchange
from gradweave.sparse.rounds import Step
from gradweave.sparse.vectors import SparseVector, index_type, message_bytes, pack, unpack


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
        self._agreement = Agreement(group)
        self._calls = 0

    def start_sum(self, message: torch.Tensor) -> Callable[[], None]:
        """Begin to sum a flat tensor over the ranks, in place, by gloo; call the result to wait."""
        kind = f"sum, {message.dtype}, {message.numel()} elements"
        call = Call(self.group, "sum", kind, self._calls)
        self._calls += 1
        self._agreement.check(call, device=torch.device("cpu"))
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
        chosen = find_exchange(exchange)
        call = Call(
            self.group, exchange, f"{exchange}, {values}, {k} of {numel} elements", self._calls
        )
        self._calls += 1
        self._agreement.check(call, device=torch.device("cpu"))
        part = chosen.part(self.group.rank(), mine, k)
        steps = chosen.steps(self.group.rank(), self.group.size())
        line = _Line(call, k, values, index_type(numel))
        # All receives are posted at once: gloo moves a message when both sides have.
        arriving = {step.round: line.post(step) for step in steps if step.source is not None}
        sending = []
        for step in steps:
            if step.to is not None:
                sending.append((step, line.send(step, part.outgoing(step))))
            if step.source is not None:
                part.arrived(step, line.take(step, *arriving.pop(step.round)))
        for step, work in sending:
            line.wait(work, f"round {step.round}, sending to rank {step.to}")
        return part.result()


Message = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Line:
    """A call's way to the other ranks: vectors in one message, errors that say what went on."""

    call: Call
    k: int
    values: np.dtype[Any]
    indices: np.dtype[Any]

    def post(self, step: Step) -> tuple[Message, dist.Work]:
        assert step.source is not None
        message = self._message(step)
        try:
            work = self.call.group.recv(
                [torch.from_numpy(message)], step.source, self.call.salt + step.round
            )
        except RuntimeError as error:
            raise self.call.failed(_receiving(step), error) from error
        return message, work

    def take(self, step: Step, message: Message, work: dist.Work) -> list[SparseVector]:
        self.wait(work, _receiving(step))
        parts = message.reshape(step.vectors, -1)
        return [unpack(part, self.values, self.indices) for part in parts]

    def send(self, step: Step, vectors: list[SparseVector]) -> dist.Work:
        assert step.to is not None
        message = self._message(step)
        for part, vector in zip(message.reshape(step.vectors, -1), vectors, strict=True):
            pack(vector, part)
        try:
            return self.call.group.send(
                [torch.from_numpy(message)], step.to, self.call.salt + step.round
            )
        except RuntimeError as error:
            doing = f"round {step.round}, sending to rank {step.to}"
            raise self.call.failed(doing, error) from error

    def wait(self, work: dist.Work, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.call.failed(doing, error) from error

    def _message(self, step: Step) -> Message:
        return np.zeros(step.vectors * message_bytes(self.k, self.values, self.indices), np.uint8)


def _receiving(step: Step) -> str:
    return f"round {step.round}, receiving from rank {step.source}"

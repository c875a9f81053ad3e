"""Sparsified buckets as planned, also in the step in which torch's are not yet.

After every start and every change torch sends one step in buckets of its own. What is selected
depends on who shares a bucket, so that step is regrouped: training goes on bit for bit wherever it
was interrupted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gradweave.comm.worker import CommunicationThread, future_on
from gradweave.runtime.passes import is_under_way
from gradweave.sparse.training import SparseTraining

AnyFuture = torch.futures.Future[Any]


class PlannedBuckets:
    """Sends buckets that are as planned at once, and others when all of them have come."""

    def __init__(
        self, sparse: SparseTraining, thread: CommunicationThread, planned: Sequence[Sequence[str]]
    ) -> None:
        self.sparse, self._thread, self._planned = sparse, thread, planned
        self._held: dict[str, torch.Tensor] = {}  # by parameter, parts of messages
        self._waiting: list[tuple[torch.Tensor, AnyFuture]] = []

    def send(
        self, message: torch.Tensor, parameters: Sequence[nn.Parameter], *, bucket: int, last: bool
    ) -> AnyFuture:
        """In place; the future is done when the message is."""
        if bucket == 0:  # not at a forward pass: ranks that have left a join() have none
            self.sparse.begin_step(is_idle=not is_under_way())
        names = self.sparse.names_of(parameters)
        is_planned = bucket >= len(self._planned) or set(names) == set(self._planned[bucket])
        if is_planned and not self._held:
            return self._thread.submit_task(partial(self.sparse.average, message, names), message)
        lengths = [parameter.numel() for parameter in parameters]
        self._held.update(zip(names, torch.split(message, lengths), strict=True))
        if not last:
            done: AnyFuture = future_on(message.device)
            self._waiting.append((message, done))
            return done
        sent = self._thread.submit_task(partial(self._regrouped, self._held), message)
        for held, done in self._waiting:
            sent.then(partial(_pass_on, held, done))
        self._held, self._waiting = {}, []
        return sent

    def _regrouped(self, held: dict[str, torch.Tensor]) -> None:
        for names in self._planned:
            parts = [held[name] for name in names if name in held]
            if parts:
                message = torch.cat(parts)
                self.sparse.average(message, [name for name in names if name in held])
                for part, averaged in zip(
                    parts, torch.split(message, [len(part) for part in parts]), strict=True
                ):
                    part.copy_(averaged)


def _pass_on(message: torch.Tensor, done: AnyFuture, sent: AnyFuture) -> None:
    try:
        sent.value()
    except Exception as error:  # noqa: BLE001 whoever waits for this one sees it
        done.set_exception(error)
    else:
        done.set_result(message)

"""Sparsified buckets as planned, also in the step in which torch's are not yet.

After every start and every change torch sends one step in buckets of its own. What is selected
depends on who shares a bucket, so that step is regrouped: training goes on bit for bit wherever it
was interrupted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gradweave.comm.worker import CommunicationThread, future_on
from gradweave.sparse.training import SparseTraining
from gradweave.torch_internals import is_in_backward

Sent = torch.futures.Future[Any]


class PlannedBuckets:
    """Sends buckets that are as planned at once, and others when all of them have come."""

    def __init__(
        self, sparse: SparseTraining, thread: CommunicationThread, planned: Sequence[Sequence[str]]
    ) -> None:
        self.sparse, self._thread, self._planned = sparse, thread, planned
        self._held: dict[str, torch.Tensor] = {}  # by parameter, parts of messages
        self._frozen: set[str] = set()  # of those
        self._waiting: list[tuple[torch.Tensor, Sent]] = []

    def send(
        self,
        message: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        bucket: int,
        last: bool,
        before: Callable[[], None] | None = None,
    ) -> Sent:
        """In place; the future is done when the message is.

        Where none of its parameters is used, torch sends a bucket in the forward pass. It waits for
        backward: until then, what becomes of the step before may change. ``before`` is called in
        the backward pass, before anything is done to the message.
        """
        send = partial(self._send, message, parameters, bucket=bucket, last=last)
        if is_in_backward():
            return send(before=before)
        if self.sparse.may_be_idle():
            return send(is_idle=True)
        if bucket == 0:
            self.sparse.fates.forget_callbacks()
        done: Sent = future_on(message.device)
        self.sparse.fates.at_first_gradient(
            lambda: send(before=before).then(partial(_pass_on, message, done))
        )
        return done

    def _send(
        self,
        message: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        bucket: int,
        last: bool,
        before: Callable[[], None] | None = None,
        is_idle: bool = False,
    ) -> Sent:
        if bucket == 0:  # not at a forward pass: ranks that have left a join() have none
            self.sparse.begin_step(is_idle=is_idle)
        if before is not None:
            before()
        names = self.sparse.names_of(parameters)
        frozen = {name for name, p in zip(names, parameters, strict=True) if not p.requires_grad}
        is_planned = bucket >= len(self._planned) or set(names) == set(self._planned[bucket])
        if is_planned and not self._held:
            average = partial(self.sparse.average, message, names, frozen=frozen)
            return self._thread.submit_task(average, message)
        lengths = [parameter.numel() for parameter in parameters]
        self._held.update(zip(names, torch.split(message, lengths), strict=True))
        self._frozen |= frozen
        if not last:
            done: Sent = future_on(message.device)
            self._waiting.append((message, done))
            return done
        sent = self._thread.submit_task(
            partial(self._regrouped, self._held, frozen=self._frozen), message
        )
        for held, done in self._waiting:
            sent.then(partial(_pass_on, held, done))
        self._held, self._frozen, self._waiting = {}, set(), []
        return sent

    def _regrouped(self, held: dict[str, torch.Tensor], *, frozen: set[str]) -> None:
        for planned in self._planned:
            names = [name for name in planned if name in held]
            parts = [held[name] for name in names]
            if parts:
                message = torch.cat(parts)
                self.sparse.average(message, names, frozen=frozen)
                for part, averaged in zip(
                    parts, torch.split(message, [len(part) for part in parts]), strict=True
                ):
                    part.copy_(averaged)


def _pass_on(message: torch.Tensor, done: Sent, sent: Sent) -> None:
    try:
        sent.value()
    except Exception as error:  # noqa: BLE001 whoever waits for this one sees it
        done.set_exception(error)
    else:
        done.set_result(message)

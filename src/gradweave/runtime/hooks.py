"""The communication hook: how a bucket travels when torch's own all-reduce is not what is wanted.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from gradweave.comm.worker import CommunicationThread
from gradweave.errors import CollectiveError
from gradweave.measure.spans import SpanRecorder
from gradweave.runtime.passes import after_torch
from gradweave.runtime.regroup import PlannedBuckets
from gradweave.sparse.training import SparseTraining
from gradweave.torch_internals import changes_in_place

logger = logging.getLogger(__name__)


class BucketSender:
    """What the hook needs to know, and the failure that the wrapper raises at its next forward."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        collectives: Sequence[str] = (),
        thread: CommunicationThread | None = None,
        wire_dtype: torch.dtype | None = None,
        recorder: SpanRecorder | None = None,
        sparse: PlannedBuckets | None = None,
        finds_unused: bool = False,
    ) -> None:
        self.group, self.thread, self.sparse = group, thread, sparse
        self.finds_unused = finds_unused
        self.wire_dtype, self.recorder = wire_dtype, recorder
        self.step = 0
        self.failure: CollectiveError | None = None
        self._collectives = collectives

    def way_of(self, bucket: int) -> str:
        """For people."""
        if self.sparse is not None:
            return self.sparse.sparse.settings.exchange
        return self.collective_of(bucket)

    def collective_of(self, bucket: int) -> str:
        """As planned; torch's first buckets, before it knows the order, may be more than these."""
        return self._collectives[bucket] if bucket < len(self._collectives) else "native"

    def add(self, message: torch.Tensor, bucket: int) -> torch.futures.Future[Any]:
        """In place."""
        collective = self.collective_of(bucket)
        if collective == "native":
            return self.group.allreduce([message]).get_future()
        assert self.thread is not None, "who names a collective gives a thread to run it"
        return self.thread.submit("all-reduce", message, collective=collective)

    def failed(self, bucket: int, error: Exception) -> CollectiveError:
        self.failure = CollectiveError(
            f"rank {self.group.rank()}, step {self.step}, bucket {bucket + 1} by "
            f"{self.way_of(bucket)}: {error}"
        )
        logger.error("%s", self.failure)
        return self.failure


def send_bucket(
    state: BucketSender,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, by its collective and in its width on the wire."""
    number, parameters = bucket.index(), bucket.parameters()
    gradient: torch.Tensor = bucket.buffer()
    recorder = state.recorder
    ready_s = 0.0 if recorder is None else recorder.ready()
    if state.sparse is None:
        gradient.div_(state.group.size())  # before the sum: a narrow type would overflow
    message = gradient if state.wire_dtype is None else gradient.to(state.wire_dtype)

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        try:
            future.value()
        except Exception as error:
            raise state.failed(number, error) from error
        if message is not gradient:
            gradient.copy_(message)
        if recorder is not None:
            recorder.done(ready_s, parameters, message.nbytes)
        return gradient

    try:
        if state.sparse is None:
            sent = state.add(message, number)
        else:
            before = None
            if state.finds_unused:
                before = partial(_write_left_out_later, parameters, bucket.gradients())
            sent = state.sparse.send(
                message, parameters, bucket=number, last=bucket.is_last(), before=before
            )
            state.step = state.sparse.sparse.step
    except Exception as error:
        raise state.failed(number, error) from error
    return sent.then(finish)


class SettlingJoinHook(JoinHook):
    """torch's, for ranks that run out of data, and a last sparse step that all ranks agree on."""

    def __init__(self, torchs: JoinHook, sparse: SparseTraining) -> None:
        self._torchs, self._sparse = torchs, sparse

    def main_hook(self) -> None:
        self._torchs.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001
        self._sparse.settle(is_idle=not is_last_joiner)
        self._torchs.post_hook(is_last_joiner)


class _Part(NamedTuple):
    """A parameter's part of a bucket, and its gradient before torch writes it."""

    parameter: nn.Parameter
    averaged: torch.Tensor
    gradient: torch.Tensor | None
    changes: int
    frozen: torch.Tensor | None  # a copy of the gradient where there must not be another


def _write_left_out_later(parameters: list[nn.Parameter], parts: list[torch.Tensor]) -> None:
    """In a backward pass, before the bucket is touched."""
    noted = [_noted(*part) for part in zip(parameters, parts, strict=True)]
    after_torch(partial(_write_left_out, noted))


def _noted(parameter: nn.Parameter, averaged: torch.Tensor) -> _Part:
    gradient = parameter.grad
    changes = 0 if gradient is None else changes_in_place(gradient)
    frozen = None if parameter.requires_grad or gradient is None else gradient.clone()
    return _Part(parameter, averaged, gradient, changes, frozen)


def _write_left_out(parts: list[_Part]) -> None:
    """Residuals travel also for parameters that no rank has used, which torch leaves alone.

    Those of frozen parameters do not, and whatever gradients these have stays, also where it is a
    part of the bucket.
    """
    for parameter, averaged, gradient, changes, frozen in parts:
        now = parameter.grad
        is_in_bucket = now is not None and now.data_ptr() == averaged.data_ptr()
        if not parameter.requires_grad:
            if now is not None and frozen is not None and is_in_bucket and not averaged.any():
                now.copy_(frozen)
        elif now is None:
            if averaged.any():
                parameter.grad = averaged.clone()
        elif now is gradient and changes_in_place(now) == changes and not is_in_bucket:
            now.copy_(averaged)  # which has what was there: torch puts that into the bucket

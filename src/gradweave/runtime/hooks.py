"""The communication hook: how a bucket travels when torch's own all-reduce is not what is wanted.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave.comm.worker import CommunicationThread
from gradweave.errors import CollectiveError
from gradweave.measure.spans import SpanRecorder
from gradweave.sparse.training import SparseTraining

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
        sparse: SparseTraining | None = None,
    ) -> None:
        self.group, self.thread, self.sparse = group, thread, sparse
        self.wire_dtype, self.recorder = wire_dtype, recorder
        self.step = 0
        self.failure: CollectiveError | None = None
        self._collectives = collectives

    def collective_of(self, bucket: int) -> str:
        """As planned; torch's first buckets, before it knows the order, may be more than these."""
        return self._collectives[bucket] if bucket < len(self._collectives) else "native"

    def average(
        self, message: torch.Tensor, bucket: int, parameters: list[nn.Parameter]
    ) -> torch.futures.Future[Any]:
        """Sum in place; a sparse one divides too."""
        if self.sparse is not None:
            assert self.thread is not None
            if bucket == 0:  # not at a forward pass: ranks that have left a join() have none
                self.sparse.begin_step()
                self.step = self.sparse.step
            task = partial(self.sparse.average, message, parameters)
            return self.thread.submit_task(task, message)
        collective = self.collective_of(bucket)
        if collective == "native":
            return self.group.allreduce([message]).get_future()
        assert self.thread is not None, "who names a collective gives a thread to run it"
        return self.thread.submit("all-reduce", message, collective=collective)

    def failed(self, bucket: int, error: Exception) -> CollectiveError:
        self.failure = CollectiveError(
            f"rank {self.group.rank()}, step {self.step}, bucket {bucket + 1} by "
            f"{self.collective_of(bucket)}: {error}"
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
        sent = state.average(message, number, parameters)
    except Exception as error:
        raise state.failed(number, error) from error
    return sent.then(finish)

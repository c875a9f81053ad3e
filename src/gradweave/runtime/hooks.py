"""The communication hook: how a bucket travels when torch's own all-reduce is not what is wanted.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradweave.comm.worker import CommunicationThread
from gradweave.errors import CollectiveError
from gradweave.measure.spans import SpanRecorder
from gradweave.runtime.regroup import PlannedBuckets

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
    ) -> None:
        self.group, self.thread, self.sparse = group, thread, sparse
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
            sent = state.sparse.send(message, parameters, bucket=number, last=bucket.is_last())
            state.step = state.sparse.sparse.step
    except Exception as error:
        raise state.failed(number, error) from error
    return sent.then(finish)

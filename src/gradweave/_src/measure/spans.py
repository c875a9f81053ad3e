"""A measured Timeline: when each bucket of torch's wrapper was ready, and when it was back.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave._src.comm.small_messages import gather_long_text, group_device, largest
from gradweave._src.timeline import Span, Timeline, length
from gradweave._src.vocabulary import Operation


class Message(NamedTuple):
    """One message, by this rank's clock."""

    ready_s: float
    done_s: float
    operation: Operation
    tensors: tuple[str, ...]
    nbytes: int


class SpanRecorder:
    """What happened in an iteration, as this rank saw it.

    Call ``begin`` before forward and ``backward`` before backward; ``timeline`` afterwards. Of
    ``kept_steps`` before the last one, messages are kept, too.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        *,
        kept_steps: int = 0,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._names, self._now_s = names, now_s
        self._messages: list[Message] = []
        self._before: deque[list[Message]] = deque(maxlen=kept_steps)
        self._lock = Lock()  # messages may end on another thread
        self._ready_s = 0.0
        self.begin()

    def begin(self) -> None:
        with self._lock:
            if self._before.maxlen:
                self._before.append(self._of_this())
            self._messages = [message for message in self._messages if self._is_of_next(message)]
        self._begin_s = self._backward_s = self._ready_s = self._now_s()

    def backward(self) -> None:
        self._backward_s = self._ready_s = self._now_s()

    def ready(self) -> float:
        """A message is complete; backward is under way at least until now."""
        self._ready_s = self._now_s()
        return self._ready_s

    def done(
        self,
        ready_s: float,
        parameters: list[nn.Parameter],
        nbytes: int,
        *,
        operation: Operation = "all-reduce",
    ) -> None:
        """A message is back."""
        tensors = tuple(self._names[parameter] for parameter in parameters)
        with self._lock:
            self._messages.append(Message(ready_s, self._now_s(), operation, tensors, nbytes))

    def _is_of_next(self, message: Message) -> bool:
        """All-gathers since backward has ended bring the next iteration's parameters."""
        return message.operation == "all-gather" and message.ready_s >= self._ready_s

    def _of_this(self) -> list[Message]:
        return sorted(message for message in self._messages if not self._is_of_next(message))

    def messages(self) -> list[list[Message]]:
        """Those of the last steps, the last one at the end; passes without any are left out."""
        with self._lock:
            return [messages for messages in (*self._before, self._of_this()) if messages]

    def communication_s(self) -> float:
        """For how long messages of the last step were on their way."""
        with self._lock:
            of_this = self._of_this()
        return length((message.ready_s, message.done_s) for message in of_this)

    @property
    def begin_s(self) -> float:
        """By this rank's clock."""
        return self._begin_s

    def timeline(self, *, since_s: float | None = None) -> Timeline:
        """Seconds since forward began, or since another moment of this rank's clock."""
        zero_s = self._begin_s if since_s is None else since_s

        def since_begin(moment_s: float) -> float:
            return max(0.0, moment_s - zero_s)

        with self._lock:
            messages_of_this = self._of_this()
        forward = Span(
            lane="forward",
            label="forward",
            start_s=since_begin(self._begin_s),
            end_s=since_begin(self._backward_s),
            tensors=(),
        )
        backward = Span(
            lane="backward",
            label="backward",
            start_s=forward.end_s,
            end_s=since_begin(self._ready_s),
            tensors=(),
        )
        messages = (
            Span(
                lane="communication",
                label=f"{message.operation} {number}",
                start_s=since_begin(message.ready_s),
                end_s=since_begin(message.done_s),
                tensors=message.tensors,
                nbytes=message.nbytes,
            )
            for number, message in enumerate(messages_of_this, 1)
        )
        return Timeline(spans=(forward, backward, *messages))


def aligned_timelines(
    recorder: SpanRecorder, group: dist.ProcessGroup, offset_s: float
) -> list[Timeline]:
    """Of all ranks, counted from when the first of them began. Call it on every rank.

    ``offset_s`` added to this rank's clock gives rank 0's.
    """
    device = group_device(group)
    (negated_s,) = largest(group, [-(recorder.begin_s + offset_s)], device=device)
    own = recorder.timeline(since_s=-negated_s - offset_s)
    texts = gather_long_text(group, msgspec.json.encode(own).decode(), device=device)
    return [msgspec.json.decode(text, type=Timeline) for text in texts]


Sent = torch.futures.Future[torch.Tensor]
Send = Callable[[Any], Sent]  # a dist.GradBucket, which torch does not export


class _HookState:
    def __init__(self, recorder: SpanRecorder, send: Send) -> None:
        self.recorder, self.send = recorder, send

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Nothing stays of it in a copy of the wrapper, where torch registers no hook."""
        return object, ()


def watch(
    ddp: DistributedDataParallel,
    recorder: SpanRecorder,
    send: Send | None = None,
) -> None:
    """Have the recorder see every bucket. Before the first backward, and instead of other hooks.

    ``send`` is what another hook would do; by default buckets travel as they do without a hook.
    """
    ddp.register_comm_hook(
        _HookState(recorder, send or partial(_average, ddp.process_group)), _send_and_note
    )


def _send_and_note(
    state: _HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    ready_s = state.recorder.ready()
    parameters, nbytes = bucket.parameters(), bucket.buffer().nbytes

    def note(future: Sent) -> torch.Tensor:
        state.recorder.done(ready_s, parameters, nbytes)
        return future.value()

    return state.send(bucket).then(note)


def _average(group: dist.ProcessGroup, bucket: Any) -> Sent:
    # Multiplied, as torch does it without a hook: quotients may differ in the last bit.
    gradient: torch.Tensor = bucket.buffer().mul_(1.0 / group.size())
    return group.allreduce([gradient]).get_future().then(lambda done: done.value()[0])

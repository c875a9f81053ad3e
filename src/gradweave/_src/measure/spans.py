"""A measured Timeline: when each bucket of torch's wrapper was ready, and when it was back.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave._src.clocks import Clock, HostClock, have_passed
from gradweave._src.comm.small_messages import gather_long_text, largest
from gradweave._src.device_order import is_capturing
from gradweave._src.timeline import Span, Timeline, length
from gradweave._src.vocabulary import Operation


class Message(NamedTuple):
    """One message, in seconds since its step began on this rank."""

    ready_s: float
    done_s: float
    operation: Operation
    tensors: tuple[str, ...]
    nbytes: int


class Mark(NamedTuple):
    """A moment, and its place among all marks, so that it is known at once which came first."""

    place: int
    moment: object


class _Noted(NamedTuple):
    ready: Mark
    done: object
    operation: Operation
    tensors: tuple[str, ...]
    nbytes: int


class _Step(NamedTuple):
    """A step that is over."""

    begin: object
    messages: list[_Noted]


class SpanRecorder:
    """What happened in an iteration, as this rank saw it.

    Call ``begin`` before forward, ``backward`` before backward and ``timeline`` afterwards.
    Messages of the ``kept_steps`` steps before the last are kept. ``timeline`` and ``messages``
    wait until an accelerator has done the step; ``communication_s`` does not wait.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        *,
        kept_steps: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._names, self._clock = names, clock or HostClock()
        self._messages: list[_Noted] = []
        self._before: deque[_Step] = deque(maxlen=kept_steps)
        self._lock = Lock()  # messages may end on another thread
        self._places = count()
        self._begin = self._backward = self._ready = self.mark()

    def mark(self) -> Mark:
        return Mark(next(self._places), self._clock.mark())

    def begin(self) -> None:
        with self._lock:
            if self._before.maxlen:
                self._before.append(_Step(self._begin.moment, self._of_this()))
            self._messages = [message for message in self._messages if self._is_of_next(message)]
        self._begin = self._backward = self._ready = self.mark()

    def backward(self) -> None:
        self._backward = self._ready = self.mark()

    def ready(self) -> Mark:
        """Note that a message is complete; backward is under way at least until now."""
        self._ready = self.mark()
        return self._ready

    def done(
        self,
        ready: Mark,
        parameters: list[nn.Parameter],
        nbytes: int,
        *,
        operation: Operation = "all-reduce",
    ) -> None:
        """Note that a message is back."""
        tensors = tuple(self._names[parameter] for parameter in parameters)
        with self._lock:
            self._messages.append(_Noted(ready, self._clock.mark(), operation, tensors, nbytes))

    def _is_of_next(self, message: _Noted) -> bool:
        """Return whether it is an all-gather after backward, of the next step's parameters."""
        return message.operation == "all-gather" and message.ready.place >= self._ready.place

    def _of_this(self) -> list[_Noted]:
        of_this = [message for message in self._messages if not self._is_of_next(message)]
        return sorted(of_this, key=lambda message: message.ready.place)

    def _steps(self) -> list[_Step]:
        with self._lock:
            return [*self._before, _Step(self._begin.moment, self._of_this())]

    def messages(self) -> list[list[Message]]:
        """Return the messages of the last steps in order, without steps that had none."""
        steps = [step for step in self._steps() if step.messages]
        for step in steps:
            self._wait_for(step)
        return [self._messages_of(step) for step in steps]

    def message_count(self) -> int | None:
        """Return how many messages the last step had that sent any; None before the first."""
        return next((len(s.messages) for s in reversed(self._steps()) if s.messages), None)

    def _messages_of(self, step: _Step) -> list[Message]:
        since = self._clock.seconds
        return sorted(
            Message(
                since(step.begin, message.ready.moment),
                since(step.begin, message.done),
                message.operation,
                message.tensors,
                message.nbytes,
            )
            for message in step.messages
        )

    def _wait_for(self, step: _Step) -> None:
        for message in step.messages:
            self._clock.wait_until(message.done)

    def communication_s(self) -> float | None:
        """Return how long messages of the last step were on their way; None while some are."""
        step = self._steps()[-1]
        if not have_passed(self._clock, [step.begin, *(m.done for m in step.messages)]):
            return None
        return length((message.ready_s, message.done_s) for message in self._messages_of(step))

    @property
    def begin_s(self) -> float:
        """When the step began by this rank's clock; waits for what an accelerator has to do."""
        return self._clock.on_host_s(self._begin.moment)

    def timeline(self, *, since_begin_s: float = 0.0) -> Timeline:
        """Return the timeline of the last step.

        Times count from ``since_begin_s`` before forward began.
        """
        clock, begin = self._clock, self._begin.moment
        step = self._steps()[-1]
        for mark in (self._begin, self._backward, self._ready):
            clock.wait_until(mark.moment)
        self._wait_for(step)

        def moment_s(since_forward_s: float) -> float:
            return max(0.0, since_forward_s + since_begin_s)

        forward = Span(
            lane="forward",
            label="forward",
            start_s=moment_s(0.0),
            end_s=moment_s(clock.seconds(begin, self._backward.moment)),
            tensors=(),
        )
        backward = Span(
            lane="backward",
            label="backward",
            start_s=forward.end_s,
            end_s=moment_s(clock.seconds(begin, self._ready.moment)),
            tensors=(),
        )
        messages = (
            Span(
                lane="communication",
                label=f"{message.operation} {number}",
                start_s=moment_s(message.ready_s),
                end_s=moment_s(message.done_s),
                tensors=message.tensors,
                nbytes=message.nbytes,
            )
            for number, message in enumerate(self._messages_of(step), 1)
        )
        return Timeline(spans=(forward, backward, *messages))


def aligned_timelines(
    recorder: SpanRecorder, group: dist.ProcessGroup, offset_s: float
) -> list[Timeline]:
    """Return all ranks' timelines, counted from when the first began; call it on every rank.

    ``offset_s`` added to this rank's clock gives rank 0's.
    """
    begin_s = recorder.begin_s + offset_s
    (negated_s,) = largest(group, [-begin_s])
    own = recorder.timeline(since_begin_s=begin_s + negated_s)
    texts = gather_long_text(group, msgspec.json.encode(own).decode())
    return [msgspec.json.decode(text, type=Timeline) for text in texts]


Sent = torch.futures.Future[torch.Tensor]
Send = Callable[[Any], Sent]  # a dist.GradBucket, which torch does not export


class _HookState:
    def __init__(self, recorder: SpanRecorder, send: Send) -> None:
        self.recorder, self.send = recorder, send

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Leave nothing in a copy of the wrapper, for which torch registers no hook."""
        return object, ()


def watch(
    ddp: DistributedDataParallel,
    recorder: SpanRecorder,
    send: Send | None = None,
) -> None:
    """Have the recorder see every bucket; call it before the first backward.

    It registers a communication hook, of which a wrapper can have one only.
    ``send`` is what another hook would do; by default buckets travel as they do without a hook.
    """
    ddp.register_comm_hook(
        _HookState(recorder, send or partial(_average, ddp.process_group)), _send_and_note
    )


def _send_and_note(
    state: _HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    if is_capturing(bucket.buffer().device):  # it is sent later, at unknown times
        return state.send(bucket)
    recorder = state.recorder
    ready, parameters, nbytes = recorder.ready(), bucket.parameters(), bucket.buffer().nbytes

    # It does not know the group: the thread that runs it lets go of it last, perhaps when nobody
    # else has the group any more, and a group that is destroyed on its own thread waits for itself.
    def note(future: Sent) -> torch.Tensor:
        recorder.done(ready, parameters, nbytes)
        return future.value()

    return state.send(bucket).then(note)


def _average(group: dist.ProcessGroup, bucket: Any) -> Sent:
    # torch multiplies without a hook, too; a quotient may differ in the last bit.
    gradient: torch.Tensor = bucket.buffer().mul_(1.0 / group.size())
    return group.allreduce([gradient]).get_future().then(lambda done: done.value()[0])

"""How the buckets of torch's wrapper travel: by the backend itself, or in a way of ours.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.rounding.eight_bits import compile_kernels
from gradweave._src.comm.worker import SENDING, CommunicationThread, future_on
from gradweave._src.compression import KEEPS_ERRORS, ROUNDED
from gradweave._src.device_order import Order, is_capturing, keep_for_current
from gradweave._src.errors import CollectiveError
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.plan import Plan
from gradweave._src.runtime.driving.message_log import MessageLog
from gradweave._src.runtime.reducer.carried_errors import BucketLayout, CarriedErrors
from gradweave._src.runtime.wrapping.options import Options, first_collective
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.torch_internals import (
    begun_sum,
    changes_in_place,
    is_in_backward,
    named_range,
    when_backward_ends,
)
from gradweave._src.travel import parse_travel

logger = logging.getLogger(__name__)

Done = torch.futures.Future[Any]


class Transport(Protocol):
    """Averages a bucket over the ranks, in place; the future is done when that is.

    ``before`` is called in the backward pass, before anything is done to the bucket.
    """

    def average(
        self,
        gradient: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        bucket: int,
        before: Callable[[], None],
    ) -> Done: ...

    def name_of(self, bucket: int) -> str:
        """Return how the bucket travels, as people read it."""
        ...


class DenseTransport:
    """Sends whole gradients, each bucket its own way, perhaps rounded on the wire.

    Without a plan's ``ways`` all go the one that is ``named``. What roundings drop is ``carried``
    over by parameter, whose ``names`` these are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        ways: Sequence[str],
        named: str,
        own_group: OwnGroup | None,
        carried: CarriedErrors,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._group, self._ways, self._named = group, ways, named
        self._own_group, self._carried, self._names = own_group, carried, names
        self._keeping = {way for way in {*ways, named} if _keeps_errors(way)}

    def name_of(self, bucket: int) -> str:
        return self._ways[bucket] if self._ways else self._named

    def average(
        self,
        gradient: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        bucket: int,
        before: Callable[[], None],
    ) -> Done:
        before()
        # Before the sum, in which a narrow type would overflow. A product, because torch without a
        # hook multiplies: with three ranks, say, a quotient would differ in its last bit.
        gradient.mul_(1.0 / self._group.size())
        way = self.name_of(bucket)
        if way in self._keeping or self._carried.has_any:
            layout = BucketLayout(
                tuple(self._names[parameter] for parameter in parameters),
                tuple(parameter.numel() for parameter in parameters),
            )
            if way in self._keeping:
                return self._sum_and_keep(gradient, way, self._carried.of_bucket(layout, gradient))
            self._carried.give_back(layout, gradient)
        if way == "native":
            return begun_sum(self._group, gradient)
        return self._thread.submit("all-reduce", gradient, collective=way)

    def _sum_and_keep(self, gradient: torch.Tensor, way: str, carried: torch.Tensor) -> Done:
        """Add what is carried over on the sending thread, for that takes time, and send the sum."""
        thread = self._thread

        def run() -> None:
            with named_range(SENDING, "all-reduce", gradient.nbytes, way):
                keep_for_current(carried, Order.ERRORS_KEPT)
                gradient.add_(carried)
                carried.zero_()
                thread.communicator.run("all-reduce", gradient, collective=way, dropped=carried)

        return thread.submit_task(run, gradient, blocks=False)

    @property
    def _thread(self) -> CommunicationThread:
        assert self._own_group is not None, "who names a collective gives a group for it"
        return self._own_group.thread()


def _keeps_errors(way: str) -> bool:
    compression = parse_travel(way).compression
    return compression is not None and compression.rounding in KEEPS_ERRORS


class SparseTransport:
    """Sends only the largest elements; what waits in residuals stays with one wrapper for life.

    Buckets that are ``dense`` in a plan travel with all their elements.
    """

    def __init__(
        self, training: SparseTraining, own_group: OwnGroup, *, dense: Collection[int] = ()
    ) -> None:
        self._training, self._own_group, self._dense = training, own_group, dense

    def name_of(self, bucket: int) -> str:
        return "native" if bucket in self._dense else self._training.settings.exchange

    def average(
        self,
        gradient: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        bucket: int,
        before: Callable[[], None],
    ) -> Done:
        """Average a bucket when backward runs, though torch may hand it over in forward.

        torch does where none of its parameters is used. Until backward, what becomes of the step
        before may change.
        """

        def send(*, is_idle: bool = False) -> Done:
            if bucket == 0:  # not at a forward pass: ranks that have left a join() have none
                self._training.begin_step(is_idle=is_idle)
            if not is_idle:
                before()
            names = self._training.names_of(parameters)
            named = zip(names, parameters, strict=True)
            frozen = {name for name, parameter in named if not parameter.requires_grad}
            average = partial(
                self._training.average,
                gradient,
                names,
                frozen=frozen,
                dense=bucket in self._dense,
            )
            return self._own_group.thread().submit_task(average, gradient)

        if is_in_backward():
            return send()
        if self._training.may_be_idle():
            return send(is_idle=True)
        if bucket == 0:
            self._training.fates.forget_callbacks()
        done: Done = future_on(gradient.device)
        self._training.fates.at_first_gradient(
            lambda: send().then(partial(_pass_on, gradient, done))
        )
        return done


def _pass_on(message: torch.Tensor, done: Done, sent: Done) -> None:
    try:
        sent.value()
    except Exception as error:  # noqa: BLE001 whoever waits for this one sees it
        done.set_exception(error)
    else:
        done.set_result(message)


class BucketSender:
    """What torch's hook needs to know, and the failure that the wrapper raises at its next forward.

    ``step`` is the number of the present one. ``writes_unused``: residuals travel also for
    parameters that no rank has used, whose gradients torch leaves alone where it looks for such
    parameters.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        rank: int,
        step: Callable[[], int],
        recorder: SpanRecorder | None = None,
        log: MessageLog | None = None,
        writes_unused: bool = False,
    ) -> None:
        self.transport, self.writes_unused = transport, writes_unused
        self.recorder, self.log = recorder, log
        self.failure: CollectiveError | None = None
        self._rank, self._step = rank, step

    def raise_failure(self) -> None:
        """Raise what went wrong in a hook: torch says nothing clear of it, and goes on."""
        if self.failure is not None:
            raise self.failure

    def failed(self, bucket: int, error: Exception) -> CollectiveError:
        failure = CollectiveError(
            f"rank {self._rank}, step {self._step()}, bucket {bucket + 1} by "
            f"{self.transport.name_of(bucket)}: {error}"
        )
        if self.failure is None:  # what fails later on fails because of it
            self.failure = failure
            logger.error("%s", failure)
        return failure


def send_bucket(
    state: BucketSender,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks: the communication hook that torch calls."""
    number, parameters = bucket.index(), bucket.parameters()
    gradient: torch.Tensor = bucket.buffer()
    # A graph that is captured now is replayed later, any number of times.
    is_noted = not is_capturing(gradient.device)
    recorder, log = (state.recorder, state.log) if is_noted else (None, None)
    complete = None if recorder is None else recorder.ready()
    ready = None if log is None else log.clock.mark()
    by = state.transport.name_of(number)
    # Weakly: ``finish`` is dropped on the backend's thread, and a group that is destroyed on a
    # thread of its own would wait for itself.
    known = weakref.ref(state)

    def finish(future: Done) -> torch.Tensor:
        try:
            future.value()
        except Exception as error:
            if (sender := known()) is None:
                raise
            raise sender.failed(number, error) from error
        if recorder is not None and complete is not None:
            recorder.done(complete, parameters, gradient.nbytes)
        if log is not None:
            log.done(ready, operation="all-reduce", collective=by, nbytes=gradient.nbytes)
        return gradient

    def before() -> None:
        if state.writes_unused:
            noted = map(_noted, parameters, bucket.gradients())
            _after_torch(partial(_write_left_out, list(noted)))

    try:
        with named_range("gradweave: bucket %d leaves", number + 1):
            sent = state.transport.average(gradient, parameters, bucket=number, before=before)
    except Exception as error:
        raise state.failed(number, error) from error
    return sent.then(finish)


class Transports:
    """Chooses how the buckets of one wrapper travel, plan by plan."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        options: Options,
        own_group: OwnGroup | None,
        step: Callable[[], int],
        recorder: SpanRecorder | None = None,
        names: Mapping[nn.Parameter, str],
        sparse: SparseTraining | None = None,
        finds_unused: bool = False,
    ) -> None:
        self._group, self._own_group, self._recorder = group, own_group, recorder
        self._step = step
        self._named = first_collective(options, "native")
        self._sparse, self._finds_unused = sparse, finds_unused
        self._names, self._carried = names, CarriedErrors()
        if options.precision in {ROUNDED, *KEEPS_ERRORS}:
            compile_kernels()

    def sender_for(self, plan: Plan | None, log: MessageLog | None = None) -> BucketSender | None:
        """Return a sender; None where torch's all-reduce is enough, and nothing is noted."""
        if self._sparse is not None:
            assert self._own_group is not None, "sparse messages travel on a group of their own"
            buckets = () if plan is None else plan.buckets
            dense = {number for number, bucket in enumerate(buckets) if not bucket.is_sparse}
            return BucketSender(
                SparseTransport(self._sparse, self._own_group, dense=dense),
                rank=self._group.rank(),
                step=self._step,
                recorder=self._recorder,
                writes_unused=self._finds_unused,
            )
        ways = [] if plan is None else [str(bucket.travel) for bucket in plan.buckets]
        is_native = set(ways or [self._named]) == {"native"}
        is_owed = self._carried.has_any  # to gradients, which torch would not know
        if is_native and self._recorder is None and log is None and not is_owed:
            return None
        transport = DenseTransport(
            self._group,
            ways=ways,
            named=self._named,
            own_group=self._own_group,
            carried=self._carried,
            names=self._names,
        )
        return BucketSender(
            transport,
            rank=self._group.rank(),
            step=self._step,
            recorder=self._recorder,
            log=log,
        )


class _BucketPart(NamedTuple):
    """A parameter's part of a bucket, and its gradient before torch writes it."""

    parameter: nn.Parameter
    averaged: torch.Tensor
    gradient: torch.Tensor | None
    changes: int
    frozen: torch.Tensor | None  # a copy of the gradient where there must not be another


def _noted(parameter: nn.Parameter, averaged: torch.Tensor) -> _BucketPart:
    gradient = parameter.grad
    changes = 0 if gradient is None else changes_in_place(gradient)
    frozen = None if parameter.requires_grad or gradient is None else gradient.clone()
    return _BucketPart(parameter, averaged, gradient, changes, frozen)


def _after_torch(callback: Callable[[], None]) -> None:
    """Call it when backward is over and torch's wrapper has written all gradients."""
    # torch asks for its own call when the last bucket has been sent.
    when_backward_ends(partial(when_backward_ends, callback))


def _write_left_out(parts: list[_BucketPart]) -> None:
    """Write gradients of parameters that no rank has used: torch leaves them, residuals travel.

    Residuals of frozen parameters do not, and whatever gradients these have stays, also where it is
    a part of the bucket.
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


class SettlingJoinHook(JoinHook):
    """torch's hook for ranks that run out of data, with a last sparse step that all agree on."""

    def __init__(self, torchs: JoinHook, sparse: SparseTraining) -> None:
        self._torchs, self._sparse = torchs, sparse

    def main_hook(self) -> None:
        self._torchs.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001
        self._sparse.settle(is_idle=not is_last_joiner)
        self._torchs.post_hook(is_last_joiner)

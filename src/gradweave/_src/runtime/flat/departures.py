"""Sending buckets while backward goes on: each as soon as its gradients and its turn have come."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.runtime.flat.buckets import FlatBucket
from gradweave._src.torch_internals import when_backward_ends


class Departures:
    """Watches gradients come, and says which bucket is to leave.

    Buckets leave in their order, which is the same on every rank whatever the order of gradients.
    When backward has ended, those that lack gradients leave too: unused parameters have zeros.

    ``begin`` is called before the first gradient since the last departures is taken over, ``send``
    for each bucket, ``finish`` when backward has ended and all have left. Where gradients are only
    added up, ``added_up`` is called for each, and ``is_discarded`` once, later: whether the user
    does not want it any more.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        *,
        ranks: int,
        begin: Callable[[], None],
        send: Callable[[int], None],
        finish: Callable[[], None],
        added_up: Callable[[nn.Parameter], None],
        is_discarded: Callable[[nn.Parameter], bool],
    ) -> None:
        self.is_synchronised = True  # False: gradients are only added up
        self._buckets, self._ranks = buckets, ranks
        self._begin, self._send, self._finish = begin, send, finish
        self._added_up, self._is_discarded = added_up, is_discarded
        self._number_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._handles = [_when_accumulated(p, self._arrived) for p in self._number_of]
        self._reset()

    def require_ended(self) -> None:
        """Raise CollectiveError where the last backward pass has failed half-way."""
        if self._is_leaving:
            raise CollectiveError(
                "a backward pass did not end, and other ranks wait for what it has not sent; start "
                "again from a checkpoint"
            )

    def forget(self) -> None:
        """Forget what has been added up without being sent."""
        self.require_ended()
        for bucket in self._buckets:
            bucket.forget(bucket.parameters)
        self._reset()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._next = 0
        self._has_begun = self._is_leaving = False

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        number = self._number_of[parameter]
        if number < self._next:
            bucket = self._buckets[number]
            named = zip(bucket.names, bucket.parameters, strict=True)
            name = next(name for name, held in named if held is parameter)
            raise RequestError(
                f"{name!r} got another gradient in a pass after its bucket had left; checkpoint "
                "modules with use_reentrant=False"
            )
        if self._is_discarded(parameter):
            self._buckets[number].forget([parameter])
        self._buckets[number].take_gradient(parameter, divided_by=self._ranks)
        if not self.is_synchronised:
            self._added_up(parameter)
            return
        if not self._is_leaving:
            self._is_leaving = True
            when_backward_ends(self._end)
        self._missing[number].discard(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._leave()

    def _leave(self) -> None:
        number = self._next
        self._next += 1
        bucket = self._buckets[number]
        bucket.forget(list(filter(self._is_discarded, bucket.parameters)))
        bucket.complete()
        self._send(number)

    def _end(self) -> None:
        while self._next < len(self._buckets):
            self._leave()
        self._reset()
        self._finish()


def _when_accumulated(
    parameter: nn.Parameter, call: Callable[[nn.Parameter], None]
) -> RemovableHandle:
    """Have it called for each gradient, also of a parameter that is frozen for now."""
    is_trained = parameter.requires_grad
    parameter.requires_grad = True
    handle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    parameter.requires_grad = is_trained
    assert isinstance(handle, RemovableHandle)
    return handle

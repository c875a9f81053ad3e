"""Where a backward pass failed, in the log, though the error is raised in code that is not ours."""

import logging
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.runtime.reducer_engine import ReducerEngine
from gradweave.torch_internals import all_requiring_grad, when_backward_ends

logger = logging.getLogger(__name__)


class FailedPassLog:
    """Counts the synchronised backward passes of a wrapper, and logs those that do not end.

    It hangs on one parameter, which costs some microseconds in a pass. Where a hook of ours sends
    buckets, that says more by itself.
    """

    def __init__(self, ddp: TorchDDP, parameter: nn.Parameter, engine: ReducerEngine) -> None:
        self._ddp = weakref.ref(ddp)  # a parameter must not keep its wrapper alive
        self._engine = engine
        self._rank, self._steps = ddp.process_group.rank(), 0
        with all_requiring_grad([parameter]):
            self._handle = parameter.register_post_accumulate_grad_hook(self._begin)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._handle.remove()

    def _begin(self, parameter: torch.Tensor) -> None:
        del parameter
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        self._steps += 1
        if self._engine.sender is None:
            when_backward_ends(_UnendedPass(self._rank, self._steps))


class _UnendedPass:
    """A backward pass under way. torch drops it with the pass, whether that ends well or not."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step, self._has_ended = rank, step, False

    def __call__(self) -> None:
        """At the end of the pass; torch's wrapper then waits for its messages, which may fail."""
        when_backward_ends(self._end)

    def _end(self) -> None:
        self._has_ended = True

    def __del__(self) -> None:
        if not self._has_ended:
            logger.error(
                "rank %d, step %d: the backward pass failed; if a peer is gone or stalls, "
                "timeline=True also names the bucket",
                self._rank,
                self._step,
            )

"""Logging where a pass failed, though the error is raised in code that is not ours."""

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.errors import CollectiveError

logger = logging.getLogger(__name__)


def log_failed_pass_at_exit(
    ddp: TorchDDP,
    steps: "weakref.WeakMethod[Callable[[], int]]",
    steps_without_hook: "weakref.WeakMethod[Callable[[], int | None]]",
) -> None:
    """Say at exit which rank and step it was, where an error in a pass has ended the script.

    Nothing is done during steps. ``steps`` counts those that have begun; ``steps_without_hook`` is
    None where our hook has already named the bucket that failed. Errors of the model's own forward
    are not logged, nor are CollectiveErrors, which say where they arose.
    """
    rank, forward = ddp.process_group.rank(), type(ddp).forward.__code__

    def log() -> None:
        # Python notes there which error has ended the script.
        error: BaseException | None = getattr(sys, "last_value", None)
        frames = [] if error is None else list(_code(error.__traceback__))
        if any(code.co_filename == BACKWARD_FILE for code in frames):
            where, count = "backward", steps_without_hook()
        elif (
            forward in frames
            and not isinstance(error, CollectiveError)
            and not _is_of_model(frames[frames.index(forward) + 1 :])
        ):
            where, count = "forward", steps()
        else:
            return
        if count is not None and (step := count()) is not None:
            logger.error(HINTS[where], rank, step)

    atexit.register(log)
    weakref.finalize(ddp, atexit.unregister, log)


BACKWARD_FILE = torch.autograd.backward.__code__.co_filename
MODULE_FILE = nn.Module.__init__.__code__.co_filename
HINTS = {
    "backward": "rank %d, step %d: the backward pass failed; if a peer is gone or stalls, "
    "timeline=True also names the bucket",
    "forward": "rank %d, step %d: the forward pass failed outside of the model, where buffers "
    "travel; perhaps a peer is gone or stalls",
}


def _is_of_model(called_by_forward: list[CodeType]) -> bool:
    """Return whether a module was called: torch's own code is between it and whoever calls it."""
    return any(code.co_filename == MODULE_FILE for code in called_by_forward)


def _code(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next

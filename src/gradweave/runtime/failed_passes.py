"""Where a backward pass failed, in the log, though the error is raised in code that is not ours."""

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

logger = logging.getLogger(__name__)


def log_failed_pass_at_exit(
    ddp: TorchDDP, steps: "weakref.WeakMethod[Callable[[], int | None]]"
) -> None:
    """Say at exit which rank and step it was, where an error in backward has ended the script.

    Nothing is done in a step for it. ``steps`` says how many there were, or None where somebody
    else has said more already.
    """
    rank = ddp.process_group.rank()

    def log() -> None:
        count = steps()
        # Where Python notes what has ended the script.
        error: BaseException | None = getattr(sys, "last_value", None)
        if count is None or error is None or not _is_from_backward(error.__traceback__):
            return
        if (step := count()) is not None:
            logger.error(
                "rank %d, step %d: the backward pass failed; if a peer is gone or stalls, "
                "timeline=True also names the bucket",
                rank,
                step,
            )

    atexit.register(log)
    weakref.finalize(ddp, atexit.unregister, log)


def _is_from_backward(traceback: TracebackType | None) -> bool:
    return any(name == torch.autograd.backward.__code__.co_filename for name in _files(traceback))


def _files(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next

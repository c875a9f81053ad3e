"""What must happen before what on an accelerator: all of it goes through here.

Work on an accelerator is queued on streams, which know nothing of each other: a stream that reads
what another has written has to wait for it, and memory may be given to somebody else only when all
streams are done with it. A wait that is missing goes unnoticed until the accelerator is busy. So
each of ours has a name, and tests leave them out one by one to see that somebody notices
(tests/accelerator/test_mutations.py). Only ``read_after`` makes the host wait for an accelerator.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Protocol

import torch


class Order(Enum):
    """Every place where something is ordered, and why."""

    LANE_AFTER_WRITER = "a message is sent when the stream that writes it has done so"
    MESSAGE_KEPT = "a message's memory is not given away while the stream that sends uses it"
    ALL_REDUCED = "a message is back when the backend has summed it"
    BROADCAST = "a message is back when the backend has it from its root"
    REDUCED = "a message is back when the backend has summed it for its root"
    REDUCE_SCATTERED = "a message is back when the backend has summed this rank's block"
    PADDED_REDUCE_SCATTERED = "a block of another size is copied when the backend has summed it"
    ALL_GATHERED = "a message is back when the backend has all blocks"
    PADDED_ALL_GATHERED = "blocks of different sizes are copied when the backend has them all"
    LANE_AFTER_TRANSFERS = "a round of a schedule adds what has arrived"
    OPTIMIZER_AFTER_GRADIENTS = "an optimizer reads gradients that all ranks have summed"
    MODULE_AFTER_PARAMETERS = "a module reads parameters that have arrived"
    STATE_AFTER_GATHER = "what has been gathered of optimizers is moved or saved"
    BUFFERS_AFTER_BROADCAST = "buffers are written when rank 0's have arrived"
    PROBES_AFTER_STEP = "messages beside a training do not meet those of the step before"
    HOST_AFTER_COPY = "the host reads a copy when it has arrived"
    RESIDUALS_KEPT = "a bucket's residuals stay while the stream that sends uses them"
    OLD_RESIDUALS_KEPT = "residuals of a bucket that is laid out anew stay until they are copied"
    ERRORS_KEPT = "what 8-bit messages drop stays while the stream that sends adds to it"
    NORM_AFTER_SUM = "gradients are clipped by the norm of all ranks"


class Awaited(Protocol):
    """Work of a backend, or a future: on an accelerator the current stream waits, not the host."""

    def wait(self) -> object: ...


def carry_out(order: Order, act: Callable[[], object]) -> None:
    """Execute one ordering. Tests replace this function to leave single orderings out."""
    del order
    act()


def wait_for(awaited: Awaited, order: Order) -> None:
    """Have the current stream wait; on the CPU this thread does."""
    carry_out(order, awaited.wait)


def wait_for_current(stream: torch.Stream, order: Order) -> None:
    """Have a stream wait for what the thread's current stream has been asked for so far."""
    current = torch.accelerator.current_stream(stream.device)
    carry_out(order, lambda: stream.wait_stream(current))


def keep_for(tensor: torch.Tensor, stream: torch.Stream, order: Order) -> None:
    """Have the memory kept until what the stream has been asked for so far is done."""
    carry_out(order, lambda: tensor.record_stream(stream))


def keep_for_current(tensor: torch.Tensor, order: Order) -> None:
    """Have the memory kept until what the thread's current stream has been asked for is done."""
    if tensor.device.type != "cpu":
        keep_for(tensor, torch.accelerator.current_stream(tensor.device), order)


def read_after(event: torch.Event, order: Order) -> None:
    """Have this thread of the host wait for an event: on threads that do nothing but send."""
    carry_out(order, event.synchronize)


def is_capturing(device: torch.device) -> bool:
    """Return whether what is asked for now becomes part of a graph, and is not done."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Queue a block's work on the device on a stream that nobody else uses, on any thread.

    The thread's current device is that one meanwhile.
    """
    return nullcontext() if device.type == "cpu" else torch.Stream(device=device)

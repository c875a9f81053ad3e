"""Messages on their way over several threads, and what to say when they fail."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.worker import CommunicationThread, Done, OnBegin
from gradweave._src.device_order import Order, wait_for
from gradweave._src.errors import CollectiveError
from gradweave._src.torch_internals import HOST
from gradweave._src.vocabulary import Operation

# While one thread adds, or begins or ends a message, the network carries the other's. Sending a
# share of each message on both was slower: they then wait for the network at the same moments.
LANES = 2


def lanes_for(device: torch.device) -> int:
    """Return how many threads are to send messages of this device.

    One is enough where an accelerator's streams add and send by themselves: messages of two groups
    would have to share the accelerator, and backends warn of that.
    """
    return LANES if device == HOST else 1


class Lanes:
    """Threads on which messages take turns, in the order in which all ranks submit them.

    Each has a process group of its own.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._threads = [CommunicationThread(communicator) for communicator in communicators]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._threads)

    def submit(
        self,
        operation: Operation,
        message: torch.Tensor,
        *,
        collective: str,
        on_begin: OnBegin | None = None,
    ) -> Done:
        """Return what to wait for; once a message has failed, so do later ones of the same thread.

        ``on_begin`` is that of ``CommunicationThread.submit``.
        """
        thread = self._threads[self._turn]
        self._turn = (self._turn + 1) % len(self._threads)
        return thread.submit(operation, message, collective=collective, on_begin=on_begin)

    def drain(self, within_s: float) -> None:
        """Wait until everything submitted is over or has failed, so long at most per thread."""
        for thread in self._threads:
            thread.drain(within_s)

    def close(self, within_s: float | None = None) -> bool:
        """End the threads when all submitted work is done, and return whether it was in time."""
        ended = [thread.close(within_s) for thread in self._threads]
        self._threads.clear()
        return all(ended)

    def include_this_thread(self) -> bool:
        """Return whether the caller is one of the threads, which cannot wait for its own end."""
        return any(thread.is_this_thread() for thread in self._threads)


@dataclass(frozen=True, slots=True)
class Sent:
    """Something on its way, which knows what to say when it fails."""

    done: Done
    where: str
    order: Order  # what must come after its arrival

    def wait(self) -> None:
        """Wait for it, on an accelerator by its stream; raise CollectiveError if it has failed."""
        try:
            wait_for(self.done, self.order)
        except Exception as error:
            raise CollectiveError(f"{self.where}: {error}") from error

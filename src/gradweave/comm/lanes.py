"""Messages on their way over several threads, and what to say when they fail."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from gradweave.comm.communicator import Communicator
from gradweave.comm.execute import Share
from gradweave.comm.worker import CommunicationThread, Done
from gradweave.errors import CollectiveError
from gradweave.words import MIB, Operation

# While one thread adds, or begins a message, or ends one, the network carries the other's.
LANES = 2
# Smaller messages are not worth two threads: their calls cost more than overlap gains.
LEAST_SHARED_BYTES = MIB


class Lanes:
    """Sends messages in the order in which they are submitted, the same on every rank.

    A large one goes over all threads, a share of its slices over each; small ones take turns. Each
    thread has a process group of its own.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._lanes = [(one, CommunicationThread(one)) for one in communicators]
        self._turn = 0

    def submit(
        self,
        operation: Operation,
        message: torch.Tensor,
        *,
        collective: str,
        on_end: Callable[[float], None] | None = None,
    ) -> list[Done]:
        """What has to be waited for; once something has failed, so does what comes later.

        ``on_end`` is called with the moment at which the message began to travel.
        """
        if message.nbytes >= LEAST_SHARED_BYTES:
            lanes = self._lanes
        else:
            self._turn = (self._turn + 1) % len(self._lanes)
            lanes = self._lanes[self._turn :][:1]
        began_s: list[float] = []
        ended = count(1)

        def carry(communicator: Communicator, share: Share) -> None:
            began_s.append(time.perf_counter())
            communicator.run(operation, message, collective=collective, share=share)
            if next(ended) == share.of and on_end is not None:
                on_end(min(began_s))

        return [
            thread.submit_task(partial(carry, communicator, Share(number, len(lanes))), message)
            for number, (communicator, thread) in enumerate(lanes)
        ]

    def drain(self, within_s: float) -> None:
        """Until everything submitted is over or has failed, or about so long."""
        for _, thread in self._lanes:
            thread.drain(within_s)

    def close(self) -> None:
        """Until everything submitted is over."""
        for _, thread in self._lanes:
            thread.close()


@dataclass(frozen=True, slots=True)
class Message:
    """Knows what to say when it fails, without its wrapper, which modules must not keep alive."""

    shares: Sequence[Done]
    where: str

    def wait(self) -> None:
        try:
            for done in self.shares:
                done.wait()
        except Exception as error:
            raise CollectiveError(f"{self.where}: {error}") from error

"""Messages on their way: threads that send them, and what to say when they fail."""

from dataclasses import dataclass

import torch.distributed as dist

from gradweave.comm.communicator import Communicator
from gradweave.comm.worker import CommunicationThread, Done
from gradweave.errors import CollectiveError

# Messages take turns on so many threads: while one begins or ends, the network carries the other.
LANES = 2


class Lane:
    """Sends one message after the other, in the same order on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.communicator = Communicator(group)
        self.thread = CommunicationThread(self.communicator)


@dataclass(frozen=True, slots=True)
class Message:
    """Knows what to say when it fails, without its wrapper, which modules must not keep alive."""

    done: Done
    where: str

    def wait(self) -> None:
        try:
            self.done.wait()
        except Exception as error:
            raise CollectiveError(f"{self.where}: {error}") from error

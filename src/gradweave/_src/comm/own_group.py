"""A process group that nobody else uses, and the thread that sends on it."""

import logging
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch.distributed as dist

from gradweave._src.collectives.topology import Topology
from gradweave._src.comm.communicator import Communicator, host_topology
from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.letting_go import let_threads_go
from gradweave._src.comm.worker import CommunicationThread

ENDED_WITHIN_S = 5.0
# After its thread has ended, gloo's threads may hold a group's last message for a moment.
THREADS_QUIET_WITHIN_S = 0.1

logger = logging.getLogger(__name__)

MakeSameRanks = Callable[[], dist.ProcessGroup]


class OwnGroup:
    """A group of our own with its thread, opened by all ranks alike, and closed by each at will.

    ``make_group`` is the user's own way to make a group of the same ranks; the user destroys what
    it has made. ``backend`` may be "gloo" where the user's group has another one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        make_group: MakeSameRanks | None,
        *,
        backend: str | None = None,
    ) -> None:
        make = make_group or partial(same_ranks, group, backend=backend)
        self._group: dist.ProcessGroup | None = make()
        # Hosts are told through the user's group: the first message of a new one takes seconds on
        # some backends.
        self.topology: Topology = host_topology(group)
        self._thread: CommunicationThread | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        assert self._group is not None, "it is closed"
        return self._group

    def thread(self) -> CommunicationThread:
        """Return the thread of this group, which is started when it is first asked for."""
        if self._thread is None:
            self._thread = CommunicationThread(Communicator(self.group, topology=self.topology))
        return self._thread

    def close(self) -> None:
        """End the thread when everything that was submitted is over, then drop the group.

        Both stay where a message is still under way after a while: its peer may never answer.
        Garbage collection may call this on the very thread that is to end; then another thread
        waits for it.
        """
        if self._thread is not None and self._thread.is_this_thread():
            Thread(target=self.close, name="gradweave closing").start()
            return
        if self._thread is not None:
            if not self._thread.close(ENDED_WITHIN_S):
                logger.warning("messages are still under way; their thread and group stay")
                return
            self._thread = None
        if self._group is not None:
            let_threads_go(THREADS_QUIET_WITHIN_S)
            self._group = None

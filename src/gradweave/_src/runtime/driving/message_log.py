"""When each message of a training was ready and done, kept while a session learns from them."""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from gradweave._src.clocks import Clock, have_passed
from gradweave._src.session.learning import MessageTimes
from gradweave._src.vocabulary import Operation


class NotedMessage(NamedTuple):
    """A message, timed by marks of the log's clock."""

    operation: Operation
    collective: str
    nbytes: int
    ready: object
    done: object


class MessageLog:
    """A log of messages, which may end on any thread; their beginnings are marked by ``clock``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._zero = clock.mark()
        self._lock = Lock()
        self._noted: list[NotedMessage] = []

    def done(self, ready: object, *, operation: Operation, collective: str, nbytes: int) -> None:
        """Note that a message is back which was ready at a mark of the clock."""
        noted = NotedMessage(operation, collective, nbytes, ready, self.clock.mark())
        with self._lock:
            self._noted.append(noted)

    def take(self) -> tuple[NotedMessage, ...]:
        """Return the messages that were noted since this was asked last."""
        with self._lock:
            noted, self._noted = self._noted, []
        return tuple(noted)

    def times(self, noted: Sequence[NotedMessage]) -> tuple[MessageTimes, ...] | None:
        """Return when they travelled; None while some still do. Nothing is waited for."""
        if not have_passed(self.clock, [self._zero, *(message.done for message in noted)]):
            return None
        since = self.clock.seconds
        return tuple(
            MessageTimes(
                operation=message.operation,
                collective=message.collective,
                nbytes=message.nbytes,
                ready_s=since(self._zero, message.ready),
                done_s=since(self._zero, message.done),
            )
            for message in noted
        )

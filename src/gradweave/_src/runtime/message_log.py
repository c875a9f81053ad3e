"""When each message of a training was ready and done, kept while a session learns from them."""

from threading import Lock

from gradweave._src.measure.clocks import Clock
from gradweave._src.session.learning import MessageTimes
from gradweave._src.vocabulary import Operation


class MessageLog:
    """Messages may end on any thread; who sends marks their beginnings with ``clock``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._zero = clock.mark()
        self._lock = Lock()
        self._noted: list[tuple[Operation, str, int, object, object]] = []

    def done(self, ready: object, *, operation: Operation, collective: str, nbytes: int) -> None:
        """A message that was ready at a mark of the clock is back."""
        noted = (operation, collective, nbytes, ready, self.clock.mark())
        with self._lock:
            self._noted.append(noted)

    def take(self) -> tuple[MessageTimes, ...]:
        """Those that have come back since this was asked last."""
        with self._lock:
            noted, self._noted = self._noted, []
        return tuple(
            MessageTimes(
                operation=operation,
                collective=collective,
                nbytes=nbytes,
                ready_s=self.clock.seconds(self._zero, ready),
                done_s=self.clock.seconds(self._zero, done),
            )
            for operation, collective, nbytes, ready, done in noted
        )

"""One command on every rank: its output as it comes, its exit codes at the end."""

import selectors
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from msgspec import Struct

from gradweave._src.errors import LabError
from gradweave._src.lab.control import Control
from gradweave._src.lab.messages import Stop
from gradweave._src.lab.pipes import LinePipe, OutputLine, RankPipes
from gradweave._src.lab.spec import ClusterSpec

KEPT_LINES = 20
GRACE_S = 2.0
_LOST = -int(signal.SIGKILL)  # when a fabric ends, the kernel kills its ranks


class RankExit(Struct, frozen=True):
    """How one rank of a job ended; ``JobResult.exits`` has one for each.

    Attributes:
        rank: its rank.
        node: the node that it ran on.
        status: its exit status, or minus the number of the signal that ended it.
        last_lines: the last twenty lines that it wrote.
    """

    rank: int
    node: int
    status: int
    last_lines: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would give: 128 and the signal where one ended the rank."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        names = {int(known): known.name for known in signal.Signals}
        how = f"exit code {self.status}"
        if self.status < 0:
            how = f"killed by {names.get(-self.status, f'signal {-self.status}')}"
        return f"rank {self.rank} on node {self.node}: {how}"


class JobResult(Struct, frozen=True):
    """How a job ended; ``Job.wait`` returns it.

    Attributes:
        exits: how each rank ended, in the order of ranks.
        first_failure: the exit of the rank that failed first; None if none did.
    """

    exits: tuple[RankExit, ...]
    first_failure: RankExit | None

    @property
    def exit_code(self) -> int:
        """The exit code of the first rank that failed, or 0."""
        return self.first_failure.exit_code if self.first_failure else 0


class Job:
    """A command that runs on the ranks of a cluster; ``Cluster.start`` makes it.

    A thread takes in what the ranks write, and calls ``on_line`` for each line.
    """

    def __init__(
        self,
        number: int,
        pipes: Sequence[RankPipes],
        *,
        spec: ClusterSpec,
        control: Control,
        on_line: Callable[[OutputLine], None] | None,
        keep_going: bool,
    ) -> None:
        self._number, self._pipes, self._spec, self._control = number, pipes, spec, control
        self._on_line, self._keep_going = on_line, keep_going
        self._last_lines = {own.rank: deque[str](maxlen=KEPT_LINES) for own in pipes}
        self._exits: list[RankExit] = []  # in order of time
        self._error: Exception | None = None
        self._thread = Thread(target=self._watch, name=f"lab job {number}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> JobResult:
        """Wait until every rank has ended, and return how each of them did.

        Args:
            timeout_s: how many seconds to wait at most (default: any time).

        Raises:
            LabError: if that takes longer.
            Exception: what ``on_line`` raised, if it did.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            running = sorted({pipes.rank for pipes in self._pipes} - {e.rank for e in self._exits})
            raise LabError(f"after {timeout_s} s these ranks still run: {running}")
        if self._error is not None:
            raise self._error
        return JobResult(
            exits=tuple(sorted(self._exits, key=lambda found: found.rank)),
            first_failure=next((found for found in self._exits if found.status != 0), None),
        )

    def stop(self, *, grace_s: float = GRACE_S) -> None:
        """End the ranks by SIGTERM, and those that remain after ``grace_s`` seconds by SIGKILL."""
        self._control.request(Stop(self._number, grace_s))

    def _watch(self) -> None:
        with selectors.EpollSelector() as selector:  # in order of time, which first_failure needs
            for pipes in self._pipes:
                selector.register(pipes.exit_fd, selectors.EVENT_READ, pipes)
                for pipe in pipes.lines:
                    selector.register(pipe.fd, selectors.EVENT_READ, pipe)
            while len(self._exits) < len(self._pipes):
                # Lines before exits, so that a rank's pipes are open when they are read.
                ready = [key.data for key, _ in selector.select()]
                for pipe in (data for data in ready if isinstance(data, LinePipe)):
                    if not self._take(pipe):
                        selector.unregister(pipe.fd)
                for pipes in (data for data in ready if isinstance(data, RankPipes)):
                    self._take_exit(pipes)
                    for fd in (pipes.exit_fd, *(pipe.fd for pipe in pipes.lines)):
                        with suppress(KeyError):  # of one whose end was seen before
                            selector.unregister(fd)
                    pipes.close()

    def _take(self, pipe: LinePipe, *, last: bool = False) -> bool:
        """Take what can be read, and say whether there may be more."""
        for line in pipe.read(last=last):
            self._last_lines[line.rank].append(line.text)
            if self._on_line is not None and self._error is None:
                try:
                    self._on_line(line)
                except Exception as error:  # noqa: BLE001 the caller's error; `wait` raises it
                    self._error = error
                    self._stop_others()
        return not pipe.ended

    def _take_exit(self, pipes: RankPipes) -> None:
        for pipe in pipes.lines:
            self._take(pipe, last=True)
        status = pipes.exit_status()
        self._exits.append(
            RankExit(
                rank=pipes.rank,
                node=self._spec.node_of(pipes.rank),
                status=_LOST if status is None else status,
                last_lines=tuple(self._last_lines[pipes.rank]),
            )
        )
        if status != 0 and not self._keep_going:
            self._stop_others()

    def _stop_others(self) -> None:
        with suppress(LabError):  # the fabric has ended, and the ranks with it
            self.stop()

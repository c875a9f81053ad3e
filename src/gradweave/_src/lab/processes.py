"""The ranks as processes of the fabric: started, stopped, reaped."""

import os
import selectors
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from gradweave._src.lab.messages import StartRank

# Python ignores some of them, and shells others for background jobs; a rank would inherit that.
_USUALLY_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT)


class _Process(Struct):
    job: int
    rank: int
    pid: int  # and the id of its process group
    pidfd: int  # readable when it has ended
    exit_file: int
    kill_at_s: float | None = None


class Processes:
    """Every rank leads a process group of its own, so that what it starts ends with it.

    Each is watched by a pidfd of its own: epoll reports them in the order in which they ended,
    however late we look, and so the first failure is the first. ``waitid`` would list those that
    have ended by now in the order of their start.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._alive: dict[int, _Process] = {}

    def start(self, request: StartRank, files: list[int]) -> None:
        """Start a rank; ``files`` stay the caller's to close."""
        output, errors, exit_file = files
        os.chdir(request.directory)
        pid = os.posix_spawn(
            request.program,
            request.arguments,
            request.environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, errors, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_USUALLY_IGNORED,
        )
        process = _Process(request.job, request.rank, pid, os.pidfd_open(pid), os.dup(exit_file))
        self._alive[pid] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._ended, process))

    def _ended(self, process: _Process) -> bool:
        """Report and forget a rank that has ended, and end what it left running."""
        del self._alive[process.pid]
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        _signal_group(process.pid, signal.SIGKILL)  # nobody else has its id before it is reaped
        _, status = os.waitpid(process.pid, 0)
        with suppress(BrokenPipeError):  # the launcher may have gone
            os.write(process.exit_file, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(process.exit_file)
        return True

    def reap_orphans(self) -> None:
        """Reap orphans, which the first process of a PID namespace inherits; ranks stay."""
        while (pid := _ended_child()) is not None and pid not in self._alive:
            os.waitpid(pid, 0)

    def stop(self, job: int, *, grace_s: float) -> None:
        kill_at_s = time.monotonic() + grace_s
        for process in self._alive.values():
            if process.job != job:
                continue
            if process.kill_at_s is None:
                _signal_group(process.pid, signal.SIGTERM)
                process.kill_at_s = kill_at_s
            process.kill_at_s = min(process.kill_at_s, kill_at_s)

    def kill_overdue(self) -> None:
        now_s = time.monotonic()
        for process in self._alive.values():
            if process.kill_at_s is not None and process.kill_at_s <= now_s:
                _signal_group(process.pid, signal.SIGKILL)
                process.kill_at_s = None

    def until_overdue_s(self) -> float | None:
        deadlines = [p.kill_at_s for p in self._alive.values() if p.kill_at_s is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def kill(self, ranks: Sequence[int]) -> None:
        for process in self._alive.values():
            if process.rank in ranks:
                _signal_group(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill every descendant: where there is no PID namespace, nobody else would."""
        for process in self._alive.values():
            _signal_group(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                for pid in _children():
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)  # its children are ours now; see namespaces.adopt_orphans


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def _children() -> list[int]:
    listed = Path("/proc/thread-self/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)

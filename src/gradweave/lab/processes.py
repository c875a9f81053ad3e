"""The ranks as processes of the fabric: started, stopped, reaped."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from gradweave.lab.messages import StartRank

# By Python, and by shells for what they run in the background; a rank would inherit it.
_USUALLY_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT)


class _Process(Struct):
    job: int
    rank: int
    pid: int  # and the id of its process group
    exit_file: int
    kill_at_s: float | None = None


class Processes:
    """Every rank leads a process group of its own, so that what it starts ends with it."""

    def __init__(self) -> None:
        self._alive: dict[int, _Process] = {}

    def start(self, request: StartRank, files: list[int]) -> None:
        """``files`` stay the caller's to close."""
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
        self._alive[pid] = _Process(request.job, request.rank, pid, os.dup(exit_file))

    def reap(self) -> None:
        """Report and forget every rank that has ended, and end what it left running."""
        while (found := _ended()) is not None:
            if process := self._alive.pop(found, None):
                _signal_group(process.pid, signal.SIGKILL)
            _, status = os.waitpid(found, 0)
            if process:
                # The launcher may have gone, or have lost interest.
                with suppress(BrokenPipeError):
                    os.write(process.exit_file, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(process.exit_file)

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


def _ended() -> int | None:
    """A child that has ended and whose id is still its own, because it is not yet reaped."""
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

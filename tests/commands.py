"""Run a command as a user would; one that hangs is a failure that shows what it had said.

``run``       any command.
``python``    a script, in a process forked from a Python that has imported torch: see warm_python.
``launched``  the same as several ranks, which find what torchrun would have told them.
``torchrun``  ranks of torchrun itself, each of which imports torch: where torchrun is the point.
"""

import atexit
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from threading import Lock
from typing import Any, Self

# Commands here take seconds, on a busy machine a minute.
MOST_S = 300.0
# torchrun ends its ranks when it is asked to end, and gives them half a minute.
ENDING_S = 45.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM_PYTHON = Path(__file__).with_name("warm_python.py")
MOST_FILES = 8  # that a request carries: where it writes, how it has ended, what it is given
# What it imports besides ``preloaded``: to be named before the first script runs.
ALSO_PRELOADED: list[str] = []
# Of two that threads start at once, one would be forgotten and end, and its scripts with it.
_STARTING = Lock()


def run(
    *command: Any,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    most_s: float = MOST_S,
) -> subprocess.CompletedProcess[str]:
    """``environment`` is added to ours."""
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            out, said = process.communicate(timeout=most_s)
        except subprocess.TimeoutExpired:
            out, said = _end(process)
            raise AssertionError(
                f"{command} ran for more than {most_s:g} s: {out[-2000:]}{said[-4000:]}"
            ) from None
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def torchrun(
    *command: Any,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ranks: int = 2,
) -> subprocess.CompletedProcess[str]:
    """With one thread for each rank, and a port of its own: others may run at the same time."""
    return run(
        *TORCHRUN,
        "--standalone",
        f"--nproc-per-node={ranks}",
        *command,
        environment={"OMP_NUM_THREADS": "1", **(environment or {})},
        cwd=cwd,
    )


def python(
    *command: Any,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    most_s: float = MOST_S,
) -> subprocess.CompletedProcess[str]:
    """``command`` is a script, -m and a module, or -c and code; and arguments."""
    with WarmPython(command, environment or {}, cwd) as script:
        assert wait([script], most_s), f"{command} ran for more than {most_s:g} s: {script.said()}"
        return subprocess.CompletedProcess(command, script.exit_code(), *script.said())


def launched(
    *command: Any, environment: Mapping[str, str] | None = None, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """The exit code is that of the first rank to fail, which ends the others."""
    world = world_of(ranks)
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(
                WarmPython(command, {**world, **place_of(rank), **(environment or {})})
            )
            for rank in range(ranks)
        ]
        waiting, exit_code = list(scripts), 0
        while waiting:
            ended = wait(waiting, MOST_S)
            assert ended, f"{command} hangs: {[script.said() for script in scripts]}"
            waiting = [script for script in waiting if script not in ended]
            exit_code = next(filter(None, [exit_code, *(one.exit_code() for one in ended)]), 0)
            if exit_code != 0:
                for script in waiting:
                    script.end(signal.SIGTERM)
        outs, saids = zip(*(script.said() for script in scripts), strict=True)
    return subprocess.CompletedProcess(command, exit_code, "".join(outs), "".join(saids))


def world_of(ranks: int) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return {**meeting, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def place_of(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


class WarmPython:
    """A script that runs; multiprocessing waits for its end as for a connection.

    ``given`` are descriptors that it gets; their numbers there are its last arguments.
    """

    def __init__(
        self,
        command: Sequence[Any],
        environment: Mapping[str, str],
        cwd: Path | None = None,
        given: Sequence[int] = (),
    ) -> None:
        request = {
            "command": list(map(str, command)),
            "environment": {**os.environ, **environment},
            "folder": str(cwd or Path.cwd()),
        }
        self._out, self._said = TemporaryFile(), TemporaryFile()  # noqa: SIM115 closed with us
        reading, told = os.pipe()
        files = [self._out.fileno(), self._said.fileno(), told, *given]
        assert len(files) <= MOST_FILES
        with _STARTING:
            asking = _warm_python()
        socket.send_fds(asking, [json.dumps(request).encode()], files)
        os.close(told)
        # Not buffered: what is read ahead, nobody could wait for.
        self._told = os.fdopen(reading, "rb", buffering=0)
        process_id = self._told.readline()
        assert process_id, "the Python that scripts are forked from has ended; it has said why"
        self._process_id = int(process_id)
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)
        for file in (self._out, self._said, self._told):
            file.close()

    def fileno(self) -> int:
        return self._told.fileno()

    def exit_code(self) -> int:
        """Negative for a signal; waits for the end."""
        if self._exit_code is None:
            self._exit_code = int(self._told.readline())
        return self._exit_code

    def said(self) -> tuple[str, str]:
        """On stdout and on stderr, until now."""
        return _text(self._out.fileno()), _text(self._said.fileno())

    def end(self, number: signal.Signals) -> None:
        """Not where the end has been seen: its id may be another's by now."""
        if self._exit_code is None and not wait([self], 0):
            with suppress(ProcessLookupError):  # it has ended, and we will be told so
                os.kill(self._process_id, number)


def _text(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode()


@cache
def _warm_python() -> socket.socket:
    """Return where scripts are asked for: of one for all who run these tests, as it imports long.

    Who comes first starts it; it ends when the last has gone.
    """
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = Path(gettempdir(), f"gradweave-tests-{run_id}")
    with Path(gettempdir(), f"gradweave-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            asking.connect(str(place))
        except (FileNotFoundError, ConnectionRefusedError):
            place.unlink(missing_ok=True)
            _start_warm_python(place)
            asking.connect(str(place))
    atexit.register(asking.close)
    return asking


def _start_warm_python(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(place))
        listening.listen()
        listening.set_inheritable(True)
        command = [sys.executable, str(WARM_PYTHON), str(listening.fileno()), *ALSO_PRELOADED]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # forks would miss its threads
        # Nobody waits for its end: where others go on, it outlives us.
        os.posix_spawn(sys.executable, command, environment)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it had said. Politely, so that it ends what it has started."""
    process.terminate()
    try:
        return process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()

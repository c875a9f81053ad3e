"""Commands that are told to end, or cannot begin: nothing is left, and little is said."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import python

LIMIT_S = 60.0  # for what takes a second or two, on a busy machine
# A test may run where SIGINT or, under nohup, SIGHUP is ignored.
COMMAND_LINE = """
import signal, sys
from gradweave._src.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(main())
"""


def environment(**more):
    """Ours, without what a launcher of these tests may have set."""
    kept = {name: value for name, value in os.environ.items() if name not in {"RANK", "TMPDIR"}}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def calibrating(tmp_path):
    """A command whose ranks have begun: it keeps a question for them in a temporary folder."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND_LINE, "calibrate", "--nodes", "2", "--loopback"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
    ) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("gradweave-*/question.json")):
            assert time.monotonic() < deadline_s
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("number", "exit_code", "said"),
    [
        (signal.SIGINT, 130, ["gradweave calibrate: interrupted"]),
        (signal.SIGTERM, -signal.SIGTERM, []),
        (signal.SIGHUP, -signal.SIGHUP, []),
    ],
)
def test_a_command_that_is_told_to_end(calibrating, tmp_path, number, exit_code, said):
    """A second or two: it starts a fabric."""
    calibrating.send_signal(number)
    assert calibrating.wait(LIMIT_S) == exit_code
    assert calibrating.stderr.read().splitlines() == said
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        argv = ["bench", "collectives", "--op", "all-reduce", "--algorithm", "native"]
        done = python(
            *("-m", "gradweave", *argv, "--size", "1KiB"),
            environment={"RANK": "0", "WORLD_SIZE": "2", **place},
            cwd=tmp_path,
        )
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.splitlines()
    assert last == (
        f"gradweave bench collectives: 127.0.0.1:{place['MASTER_PORT']} is in use by another "
        "program; give torchrun another --master-port"
    )
    assert "Traceback" not in done.stderr
    assert not list(Path(tmp_path).iterdir())

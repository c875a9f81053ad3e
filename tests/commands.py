"""Run a command as a user would; one that hangs is a failure that shows what it had said."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Commands here take seconds, on a busy machine a minute.
MOST_S = 300.0
# torchrun ends its ranks when it is asked to end, and gives them half a minute.
ENDING_S = 45.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


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


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it had said. Politely, so that it ends what it has started."""
    process.terminate()
    try:
        return process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()

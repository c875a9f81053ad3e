"""The examples run as their first lines say, until planning has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "arguments", "first_loss"),
    [
        ("train_fashion.py", [], "2."),
        ("train_text.py", [str(ROOT / "README.md"), "--width", "48"], "4."),
    ],
)
def test_a_training(script, arguments, first_loss):
    """Seconds: two ranks import torch, and train until planning has ended."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / script), *arguments, "--steps", "60"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"step 0: loss {first_loss}" in done.stdout
    assert "planning ended: " in done.stderr
    assert "Planning took " in done.stdout

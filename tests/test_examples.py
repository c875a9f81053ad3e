"""The examples run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_training_on_the_shipped_images():
    """Seconds: two ranks import torch, and train until planning has ended."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "train_fashion.py"), "--steps", "60"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 0: loss 2." in done.stdout
    assert "planning ended: " in done.stderr
    assert "Planning took " in done.stdout

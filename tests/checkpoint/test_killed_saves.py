"""A save that is killed leaves the checkpoint before it, where each has a folder of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "killed_writes.py"


@pytest.mark.long
def test_a_kill_while_saving_leaves_the_checkpoint_before_or_the_new_one(tmp_path):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "training", str(tmp_path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this machine lets nobody trace a process")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["found"]) == {"old", "new"}
    assert sum(told["found"].values()) > 30
    assert told["last"] == "new"

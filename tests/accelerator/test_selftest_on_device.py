"""`gradweave selftest` on the simulated device: every check can be tried there, and passes."""

import json
import os
import sys
from pathlib import Path

from commands import run

from gradweave._src.selftest.checks import CHECKS

TESTS = Path(__file__).parents[1]
SELFTEST = (sys.executable, "-m", "gradweave", "selftest", "--device", "sim")
PATHS = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


def selftest(*arguments: str) -> tuple[int, str, str]:
    done = run(*SELFTEST, *arguments, environment={"PYTHONPATH": PATHS})
    return done.returncode, done.stdout, done.stderr


def test_all_checks_pass():
    code, out, said = selftest("--import", "accelerator.watched_sim", "--ranks", "2", "--json")
    assert code == 0, out + said
    found = json.loads(out)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert outcomes == dict.fromkeys(CHECKS, "passed")
    assert found["surroundings"]["backend"] == "simccl"


def test_more_ranks_than_devices_are_refused():
    code, out, said = selftest("--import", "accelerator.sim", "--ranks", "9")
    assert (code, out) == (2, "")
    assert "9 ranks need a device each, and torch finds 4 of kind sim" in said
    assert len(said.splitlines()) == 1

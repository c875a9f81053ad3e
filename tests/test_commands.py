"""The harness itself: a script that was forked begins and ends as one that was started."""

import signal
import sys

import pytest
from commands import launched, python, run

SCRIPT = r"""
import atexit, os, sys

class Thing:
    def __del__(self, write=os.write):
        write(1, b"destroyed\n")

thing = Thing()
atexit.register(print, "at exit")
print(__name__, sys.argv[1:], os.environ["TOLD"], os.getcwd(), sys.path[0], __file__)
sys.excepthook = lambda kind, *_: print("hooked", kind.__name__)
if sys.argv[1:] == ["raises"]:
    raise ArithmeticError
if sys.argv[1:] == ["exits"]:
    sys.exit(7)
"""


@pytest.mark.parametrize("ending", ["raises", "exits", "ends"])
def test_a_script_begins_and_ends_as_ever(ending, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    place = {"environment": {"TOLD": "a ü"}, "cwd": tmp_path}
    started = run(sys.executable, script, ending, **place)
    forked = python(script, ending, **place)
    assert started.stdout.splitlines()[-1] == "destroyed"
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)


def test_code_and_modules_run_too(tmp_path):
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert python("-m", "module", "x", cwd=tmp_path).stdout == "__main__ ['x']\n"
    assert python("-c", "import sys; print(__name__, sys.argv)", "x").stdout == (
        "__main__ ['-c', 'x']\n"
    )


def test_a_signal_is_told_as_subprocess_does():
    done = python("-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL


def test_a_script_that_hangs_is_ended_and_what_it_said_is_shown():
    with pytest.raises(AssertionError, match="begun"):
        python("-c", "print('begun', flush=True); import time; time.sleep(600)", most_s=1.0)


SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(rank)
print(rank.item())
"""


def test_ranks_meet():
    done = launched("-c", SUM, ranks=3)
    assert (done.returncode, done.stdout) == (0, "6\n" * 3), done.stderr


def test_the_first_rank_to_fail_ends_the_others():
    code = "import os, time; os.environ['RANK'] == '1' and exit(3); time.sleep(600)"
    assert launched("-c", code).returncode == 3

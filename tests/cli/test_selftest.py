"""`gradweave selftest` on the CPU, its mistakes in a line, and ranks that crash or hang."""

import json
import sys

import msgspec
import pytest
import torch
from commands import run, torchrun
from ranks import on_processes

from gradweave._src.cli import main
from gradweave._src.errors import CollectiveError
from gradweave._src.selftest import checks, ranks
from gradweave._src.selftest.checks import CHECKS, Place
from gradweave._src.selftest.ranks import FOLDER, NOTES, run_ranks, told
from gradweave._src.selftest.results import Check, Noted, Surroundings

GRADWEAVE = (sys.executable, "-m", "gradweave", "selftest")
SKIPPED_ON_CPU = {"no waits of the host", "no waits of the host, both passes"}
HERE = Surroundings(device="cpu", backend="gloo", ranks=2, device_names=("cpu",), versions={})
PASSED = Check(name="first", outcome="passed", line="fine")


@pytest.mark.long
def test_on_the_cpu_everything_passes_that_can_be_tried():
    """Tens of seconds: three ranks, whose averages are not exact, train for each check."""
    done = run(*GRADWEAVE, "--ranks", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert list(outcomes) == list(CHECKS)
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == SKIPPED_ON_CPU
    assert set(outcomes.values()) == {"passed", "skipped"}
    assert found["surroundings"]["backend"] == "gloo"
    assert {"torch", "gradweave", "python"} <= found["surroundings"]["versions"].keys()


@pytest.mark.long
def test_under_torchrun_rank_0_prints_the_table():
    done = torchrun("-m", "gradweave", "selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("plan carried out") == 1
    assert "2 ranks on cpu: 9 passed, 0 failed, 2 skipped" in done.stdout


def without_rounding(group):
    made = checks._reducing
    checks._reducing = lambda module, precision: made(module)
    with pytest.raises(AssertionError, match="nothing was rounded: weights are within") as told:
        checks.rounds_alike(Place(group, torch.device("cpu"), group))
    return str(told.value)


def test_other_orders_of_sums_do_not_pass_for_rounding(tmp_path):
    """Averages over three ranks differ by the order of their sums, which is no rounding."""
    told = on_processes(3, without_rounding, scratch=tmp_path)
    assert len(told) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "abacus"], "no device 'abacus': torch"),
        (["--import", "no_such_module"], "--import no_such_module: No module named"),
    ],
)
def test_a_mistake_is_one_line(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["selftest", *arguments]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert says in said
    assert len(said.splitlines()) == 1


def test_one_rank_has_nobody_to_compare_with(capsys):
    with pytest.raises(SystemExit):
        main(["selftest", "--ranks", "1"])
    assert len(capsys.readouterr().err.splitlines()) == 1


NOTED = [Noted(surroundings=HERE), Noted(began="first"), Noted(ended=PASSED), Noted(began="second")]
WRITTEN = b"".join(msgspec.json.encode(note) + b"\n" for note in NOTED)
# A rank of two checks, of which it begins the second and does something else. It imports nothing
# that takes time to start, for it must have come that far within the limit of one that hangs.
RANK = f"""
import os, sys, time
notes_file = os.path.join(os.environ["{FOLDER}"], "{NOTES}")
if os.environ["RANK"] == "0":
    with open(notes_file + " written", "wb") as file:
        file.write({WRITTEN})
    os.rename(notes_file + " written", notes_file)
while not os.path.exists(notes_file):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "most_s", "says"),
    [
        ("if os.environ['RANK'] == '1': sys.exit('a driver died')\ntime.sleep(60)", 60.0, "died"),
        ("time.sleep(60)", 4.0, "rank 0, 1 had not ended after 4 s"),
        ("os.kill(os.getpid(), 11)", 60.0, "ended with exit code -11"),
    ],
)
def test_a_rank_that_crashes_or_hangs_fails_the_check_it_was_in(ending, most_s, says, monkeypatch):
    monkeypatch.setattr(ranks, "ENDED_WITHIN_S", 0.2)
    found = run_ranks([sys.executable, "-c", RANK + ending], 2, most_s=most_s)
    assert [check.outcome for check in found.checks] == ["passed", "failed"]
    assert found.checks[1].name == "second"
    assert says in found.checks[1].line
    assert not found.has_passed


def test_ranks_that_have_not_met_are_an_error():
    with pytest.raises(CollectiveError, match="have not begun: rank 1 ended with exit code 3"):
        told([], "rank 1 ended with exit code 3", ["", ""])


def test_what_was_noted_is_told():
    noted = [Noted(surroundings=HERE), Noted(began="first"), Noted(ended=PASSED)]
    found = told(noted, None, ())
    assert (found.checks, found.has_passed) == ((PASSED,), True)
    assert found.summary == "2 ranks on cpu: 1 passed, 0 failed, 0 skipped"

"""Steps and accounts check themselves, and so do results of trainings."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gradweave import RequestError
from gradweave._src import files
from gradweave._src.phases import Phases
from gradweave._src.results import Results, StageBegin
from gradweave._src.training_record import Account, Steps

GOLDEN = Path(__file__).parents[1] / "golden"
PHASES = Phases(input_s=1.0, forward_s=2.0, backward_s=3.0, network_s=4.0)
STEPS = Steps(step_s=(1.0, 2.0), stages=(StageBegin("settled", 0),), phases=(PHASES, None))


def test_there_is_a_rank_for_each_of_the_phases():
    assert STEPS.workers == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"step_s": ()}, "step_s must not be empty"),
        ({"step_s": (1.0, -1.0)}, "step_s must be numbers >= 0"),
        ({"step_s": (float("nan"),)}, "step_s must be numbers >= 0"),
        ({"stages": (StageBegin("a", 1), StageBegin("b", 1))}, "one after the other"),
        ({"stages": (StageBegin("a", -1),)}, "one after the other"),
        ({"phases": ()}, "there is at least one rank"),
    ],
)
def test_steps_that_are_not(change, complaint):
    with pytest.raises(RequestError, match=complaint):
        replace(STEPS, **change)


@pytest.mark.parametrize("field", ["stage", "explanation"])
def test_an_account_says_something(field):
    account = files.read(GOLDEN / "account-1.json", Account)
    with pytest.raises(RequestError, match=f"{field} must not be empty"):
        replace(account, **{field: ""})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"workers": 0}, "workers must be positive"),
        ({"workers": 3}, "workers must be nodes times ranks_per_node, 4, got 3"),
        ({"predicted_s": -1.0}, "predicted_s must be a number >= 0"),
        ({"exposed_s": float("inf")}, "exposed_s must be a number >= 0"),
    ],
)
def test_rows_that_are_not(change, complaint):
    row, _ = files.read(GOLDEN / "results-2.json", Results).rows
    with pytest.raises(RequestError, match=complaint):
        replace(row, **change)


def test_what_a_training_does_not_know_is_left_open():
    known, unknown = files.read(GOLDEN / "results-2.json", Results).rows
    assert (known.efficiency, unknown.efficiency) == (0.75, None)

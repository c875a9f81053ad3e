"""The matrix of faults: what it runs, what it holds for a problem, and the table that it makes.

The faults themselves are `make test-faults`.
"""

from collections import Counter

import matrix
import pytest
from matrix import Asked, Row
from msgspec.structs import replace

ENDED = Row(
    asked=Asked("killed", "dense", "trying"),
    ended_s=1.5,
    exit_codes={0: 1, 1: 137, 2: 1},
    said={0: ["rank 0, step 7: gone"], 1: [], 2: ["rank 2, step 7: gone"]},
    weights={},
    left=[],
)
WENT_ON = Row(
    asked=Asked("link at a tenth of its rate", "dense", "trying"),
    ended_s=4.0,
    exit_codes={0: 0, 1: 0, 2: 0},
    said={0: [], 1: [], 2: []},
    weights=dict.fromkeys(range(3), "the same"),
    left=[],
)
EARLY = replace(
    ENDED, asked=Asked("ends early", "sharded", "settled"), exit_codes={0: 1, 1: 0, 2: 1}
)


@pytest.mark.parametrize("row", [ENDED, WENT_ON, EARLY])
def test_what_is_as_promised(row):
    assert row.problem is None


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (replace(ENDED, ended_s=None), "ranks still ran at the end"),
        (replace(ENDED, left=["process python"]), "left behind: process python"),
        (replace(ENDED, exit_codes={0: 0, 1: 137, 2: 1}), "rank 0 ended as if nothing had happ"),
        (replace(ENDED, said={**ENDED.said, 2: []}), "rank 2 did not say what happened"),
        (replace(ENDED, said={**ENDED.said, 2: ["a", "b"]}), "rank 2 said different things"),
        (replace(EARLY, exit_codes={0: 1, 1: 134, 2: 1}), "rank 1 ended with 134"),
        (replace(WENT_ON, exit_codes={0: 0, 1: 1, 2: 0}), "exit codes"),
        (replace(WENT_ON, weights={0: "a", 1: "b", 2: "a"}), "weights differ"),
        (replace(WENT_ON, weights={0: "a"}), "weights differ"),
    ],
)
def test_what_is_not(row, problem):
    assert row.problem.startswith(problem)


def test_a_few_stand_for_all():
    chosen = matrix.fair_subset()
    assert set(chosen) <= set(matrix.every_cell())
    assert {(one.case, one.wrapper) for one in chosen} == {
        (case, wrapper) for case in matrix.CASES for wrapper in matrix.WRAPPERS
    }
    stages = Counter((one.wrapper, one.stage) for one in chosen)
    assert len(stages) == len(matrix.WRAPPERS) * len(matrix.STAGES)
    assert min(stages.values()) >= 2


def test_rows_take_the_place_of_earlier_ones(tmp_path):
    path = tmp_path / "rows.json"
    assert matrix.kept(path) == []
    for row in (ENDED, WENT_ON, replace(ENDED, ended_s=2.5)):
        matrix.keep(path, row)
    assert matrix.kept(path) == [replace(ENDED, ended_s=2.5), WENT_ON]


def test_a_table_tells_times_and_problems():
    hung = replace(ENDED, asked=Asked("stopped", "gtopk", "recording"), ended_s=None)
    lines = matrix.table([ENDED, WENT_ON, hung]).splitlines()
    assert "| killed | dense | not run | not run | 1.5 s | not run |" in lines
    assert (
        "| link at a tenth of its rate | dense | not run | not run | goes on | not run |" in lines
    )
    (line,) = (line for line in lines if line.startswith("| stopped | gtopk |"))
    assert line.split(" | ")[2] == "**ranks still ran at the end**"
    assert len(lines) == 2 + len(matrix.CASES) * len(matrix.WRAPPERS)


def test_a_sentence_counts_them():
    hung = replace(ENDED, asked=Asked("stopped", "gtopk", "recording"), ended_s=None)
    assert matrix.summary([ENDED, WENT_ON, hung]).replace("\n", " ") == (
        f"3 cases of {len(matrix.every_cell())} were run, of which 1 did not end as promised; 1 "
        "went on, and the others had ended after 1.5 s at most, with a time-out of 5 s."
    )


def test_the_page_tells_of_the_rows_that_are_kept():
    assert matrix.made_of(matrix.kept(matrix.ROWS)) in matrix.PAGE.read_text()

"""`gradweave bench select`, on few elements."""

import json
import sys

import pytest

from gradweave._src.cli import main

SMALL = ["bench", "select", "--numel", "5000", "--density", "0.01", "--repeats", "2"]


def test_every_method_by_default(capsys):
    assert main([*SMALL, "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["radix", "threshold", "torch-topk", "sampled", "gaussian"]
    for row in rows.values():
        assert (row["numel"], row["k"]) == (5000, 50)
        assert row["median_s"] > 0
        assert row["ratio"] == pytest.approx(rows["torch-topk"]["median_s"] / row["median_s"])
    assert rows["radix"]["exact"]
    assert rows["torch-topk"]["exact"]


def test_without_numba_all_others_are_timed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for module in ("select", "vectors"):
        monkeypatch.setattr(f"gradweave._src.sparse.{module}.kernels", lambda: None)
    assert main([*SMALL, "--json"]) == 0
    captured = capsys.readouterr()
    assert [row["method"] for row in json.loads(captured.out)] == [
        "threshold",
        "torch-topk",
        "sampled",
        "gaussian",
    ]
    missing = "selection by radix needs numba, which is not installed; pip install "
    assert f"note: without radix: {missing}'gradweave[sparse]'\n" in captured.err
    assert main([*SMALL, "--method", "radix"]) == 2
    assert f"{missing}'gradweave[sparse]', or use torch-topk" in capsys.readouterr().err


def test_a_table_for_people_and_no_ratio_without_a_baseline(capsys):
    assert main([*SMALL, "--method", "radix"]) == 0
    assert "taking out 50 of 5,000 elements" in capsys.readouterr().out
    assert main([*SMALL, "--method", "radix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ratio"] is None


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--method", "radx"], "no selection 'radx', did you mean radix? There are radix"),
        (["--method", "magic"], "no selection 'magic'; there are radix, threshold"),
        (["--density", "0"], "expected a number above 0, at most 1, got '0'"),
        (["--density", "nan"], "expected a number above 0, at most 1, got 'nan'"),
        (["--numel", "0"], "expected a whole number from 1"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, complaint):
    try:
        code = main(["bench", "select", *argv])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.count("\n") == 1

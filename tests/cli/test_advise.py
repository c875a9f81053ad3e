"""What ``gradweave advise`` prints."""

import json

import pytest

from gradweave._src.advice.ways import WAYS
from gradweave._src.cli import main

JOB = ["advise", "--trace", "bert-base", "--network", "k80-10gbe", "--workers", "16"]


def test_a_table_with_a_row_for_each_way_and_one_sentence(capsys):
    assert main(JOB) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "bert-base on k80-10gbe, 16 workers: what could be done, by prediction"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert sorted(row[0] for row in rows) == sorted(WAYS)
    assert lines[-1].startswith(f"{rows[0][0]} is first: bytes, not start-ups, decide: 438 MB take")


def test_what_has_no_price_stands_there_with_its_reason(capsys):
    argv = ["advise", "--trace", "vgg16", "--network", "cluster1-16xk80-10gbe"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    reasons = dict(line.split(" has no price: ") for line in lines if "has no price" in line)
    assert list(reasons) == ["both-passes", "sparse", "half-the-workers", "twice-the-workers"]
    assert "calibrate with --op all-reduce,reduce-scatter,all-gather" in reasons["both-passes"]
    assert (
        "for 16 workers, not for 32; `gradweave calibrate` on as many"
        in reasons["twice-the-workers"]
    )


def test_json_is_the_same_for_machines(capsys):
    assert main([*JOB[:-1], "4,16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [advice["workers"] for advice in found] == [4, 16]
    for advice in found:
        names = [one["name"] for one in (*advice["options"], *advice["unpriced"])]
        assert sorted(names) == sorted(WAYS)
        for one in advice["options"]:
            assert {"step_s", "samples_per_s", "memory_bytes", "changes", "code"} <= set(one)


def test_beyond_a_curve_it_says_so(capsys):
    argv = ["advise", "--trace", "vgg16", "--network", "mpi-10gbe-measured", "--workers", "8"]
    assert main(argv) == 0
    assert "measured up to 1,048,576 bytes on 8 workers" in capsys.readouterr().err


def test_selecting_has_a_price_here_too(capsys):
    def sparse_s(*argv):
        assert main([*JOB, "--json", *argv]) == 0
        (advice,) = json.loads(capsys.readouterr().out)
        return next(one["step_s"] for one in advice["options"] if one["name"] == "sparse")

    assert sparse_s("--selection", "10ns") > sparse_s()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--trace", "nope", "--network", "k80-10gbe", "--workers", "4"], "no shipped trace"),
        (["--trace", "vgg16", "--network", "nope", "--workers", "4"], "no shipped network"),
        (["--trace", "vgg16", "--network", "k80-10gbe", "--workers", "0"], "from 1 to"),
        (["--trace", "vgg16", "--network", "k80-10gbe"], "--workers is missing"),
        (
            ["--trace", "vgg16", "--network", "cluster1-16xk80-10gbe", "--workers", "8"],
            "for 16 workers, not for 8",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, complaint):
    try:
        code = main(["advise", *argv])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""

"""``simulate`` for workers that fail, and for more of them than anybody lists."""

import json

import pytest

from gradweave._src.cli import main

TIERS = ["simulate", "--trace", "resnet50", "--network", "tiers-10gbe", "--planner", "optimal"]
FAILING = ["--failure-hours", "50000", "--restart", "300s", "--checkpoint", "30s"]


def rows_of(capsys, *options):
    assert main([*TIERS, "--collective", "blueconnect:pat", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_hundred_thousand_workers_on_tiers(capsys):
    small, large = rows_of(capsys, "--workers", "1000,100000")
    assert small["survival"] is None
    assert large["efficiency"] > 0.95


def test_failures_tell_when_to_write_checkpoints(capsys):
    small, large = (row["survival"] for row in rows_of(capsys, "--workers", "40,10000", *FAILING))
    assert large["job_mtbf_s"] == 50000 * 3600 / 10000
    assert large["interval_s"] < small["interval_s"]
    assert large["goodput"] < small["goodput"] < 1


def test_failures_have_a_table(capsys):
    assert main([*TIERS, "--workers", "400", *FAILING]) == 0
    assert "with failures, and a checkpoint as often as is best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--failure-hours", "0"], "--failure-hours: expected a number above 0"),
        (["--failure-hours", "-5"], "--failure-hours: expected a number above 0"),
        (["--failure-hours", "5", "--restart=-3s"], "'-3s' is not a duration"),
        (["--checkpoint", "30s"], "say how often a worker fails, such as --failure-hours 50000"),
        (["--collective", "blueconnect:pat"], "401 workers do not fill the tiers of 4, 10, 25"),
    ],
)
def test_mistakes_are_one_line(capsys, options, complaint):
    try:
        code = main([*TIERS, "--workers", "401", *options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert complaint in said[0]

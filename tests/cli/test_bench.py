"""`gradweave bench` on a tiny cluster; on loopback where namespaces are forbidden."""

import json
import os
import subprocess
import sys
from typing import get_args

import pytest

from gradweave.cli import main
from gradweave.measure.collectives import bus_factor
from gradweave.words import Operation


@pytest.fixture
def where():
    allowed = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True, check=False
    )
    return [] if allowed.returncode == 0 else ["--loopback"]


def test_collectives_on_an_emulated_cluster(capsys, where):
    """Several seconds: every rank imports torch."""
    argv = ["bench", "collectives", "--nodes", "2", "--rate", "1gbit", "--op", "all-reduce,reduce"]
    argv += ["--algorithm", "native,mst", "--size", "1KB,10KB", "--repeats", "2", "--json", *where]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["op"], row["bytes"], row["algorithm"]) for row in rows] == [
        (op, nbytes, algorithm)
        for op in ("all-reduce", "reduce")
        for nbytes in (1000, 10_000)
        for algorithm in ("native", "mst")
    ]
    for row in rows:
        assert row["correct"]
        assert (row["nodes"], row["ranks_per_node"], row["rate"]) == (2, 1, "1gbit")
        assert row["algbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["median_s"])
        assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"])
        assert row["p10_s"] <= row["median_s"] <= row["p90_s"]


def test_under_torchrun():
    """Several seconds: every rank imports torch."""
    argv = ["--nproc-per-node", "2", "-m", "gradweave", "bench", "collectives", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *argv, "--size", "1KB", "--repeats", "1"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["algorithm"] for row in rows] == ["native", "ring"]


def test_what_must_cross_the_busiest_link():
    factors = {op: bus_factor(op, 4) for op in get_args(Operation)}
    assert factors == {
        "all-reduce": 1.5,
        "broadcast": 1.0,
        "reduce": 1.0,
        "reduce-scatter": 0.75,
        "all-gather": 0.75,
    }


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            ["--nodes", "2", "--op", "all-reduce", "--algorithm", "magic"],
            "no all-reduce by 'magic'",
        ),
        (["--nodes", "2", "--op", "broadcast", "--algorithm", "ring"], "no broadcast by 'ring'"),
        (["--nodes", "2", "--op", "gather"], "no operation 'gather'; there are all-reduce"),
        (["--nodes", "2", "--size", "big"], "'big' is not a size"),
        (["--nodes", "2", "--rate", "fast"], "'fast' is not a rate"),
        (["--nodes", "3", "--racks", "2"], "racks must divide the 3 nodes evenly"),
        (["--nodes", "2", "--size", "1KB,6B"], "messages are float32; 6 is not a multiple of 4"),
        ([], "--nodes is missing"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, argv, complaint):
    monkeypatch.delenv("RANK", raising=False)
    try:
        code = main(["bench", "collectives", *argv])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.count("\n") == 1

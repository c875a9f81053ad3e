"""`gradweave bench` on a tiny cluster; on loopback where namespaces are forbidden."""

import json
import subprocess
from typing import get_args

import pytest
from commands import launched, torchrun

from gradweave import load_trace
from gradweave._src.bench import training
from gradweave._src.bench.training import median_s, swept_caps_mb
from gradweave._src.cli import main
from gradweave._src.measure.collectives import bus_factor
from gradweave._src.runs import RunFolder
from gradweave._src.vocabulary import Operation


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


@pytest.mark.long
def test_under_torchrun():
    """Several seconds: every rank imports torch."""
    done = torchrun(
        "-m", "gradweave", "bench", "collectives", "--json", "--size", "1KB", "--repeats", "1"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["algorithm"] for row in rows] == ["native", "ring"]


@pytest.mark.parametrize("inside", ["compute", "resnet20"])
def test_what_is_in_the_way_is_said_before_anything_runs(tmp_path, capsys, monkeypatch, inside):
    """Of the second trace as well, though the first would take minutes."""
    argv = ["bench", "training", "--nodes", "2", "--trace", "alexnet,resnet20"]
    for_run = tmp_path / "resnet20-2-nodes"
    in_the_way = for_run if inside == "resnet20" else for_run / inside
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.touch()
    monkeypatch.setattr("gradweave._src.cli.bench_training.Cluster", None)
    assert main([*argv, "--output", str(tmp_path)]) == 2
    assert str(in_the_way) in capsys.readouterr().err
    assert in_the_way.read_bytes() == b""


@pytest.mark.long
def test_training_as_under_torchrun(tmp_path):
    """Two traces, and a runtime that asks all first."""
    argv = ["bench", "training", "--trace", "resnet20,alexnet", "--parameter-scale", "0.01"]
    argv += ["--forward", "5ms", "--backward", "10ms", "--runtime", "torch-ddp,powersgd:1,optimal"]
    argv += ["--repeats", "1", "--iterations", "1", "--warmup", "2", "--output", str(tmp_path)]
    done = launched("-m", "gradweave", *argv, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["trace"], row["runtime"]) for row in rows] == [
        (trace, runtime)
        for trace in ("resnet20", "alexnet")
        for runtime in ("torch-ddp", "powersgd:1", "optimal")
    ]
    for row in rows:
        assert row["correct"]
        assert (row["nodes"], row["ranks_per_node"], row["rate"]) == (1, 2, None)
        assert min(row["iteration_s"], row["predicted_s"]) >= 0.015
    run = RunFolder(tmp_path / "alexnet-1-nodes").read()
    assert run.network.known_workers == (2,)
    assert len(run.measured["optimal"]) == 2
    assert run.results.command.startswith(
        "torchrun --nnodes 1 --nproc-per-node 2 -m gradweave bench training --trace"
    )


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
        (
            ["--nodes", "2", "--op", "gather"],
            "no operation 'gather', did you mean all-gather? Ther",
        ),
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


@pytest.mark.long
def test_calibrating_and_training_on_an_emulated_cluster(capsys, where, tmp_path, monkeypatch):
    """Several seconds: every rank imports torch, three times."""
    asked, ask = [], training.ask_for_times

    def noting(ask_ranks, question, *args, **kwargs):
        answers = ask(ask_ranks, question, *args, **kwargs)
        asked.append((question.cases, answers))
        return answers

    monkeypatch.setattr(training, "ask_for_times", noting)
    network = str(tmp_path / "network.json")
    argv = ["calibrate", "--nodes", "2", "--rate", "1gbit", "--largest", "64KiB", "--repeats", "2"]
    assert main([*argv, "--output", network, "--json", *where]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["collective"], row["beside"]) for row in rows] == [
        ("native", "nothing"),
        ("native", "compute"),
    ]
    assert {"startup_s", "s_per_byte", "r_squared", "worst_residual", "latency_s"} <= set(rows[0])

    argv = ["bench", "training", "--nodes", "2", "--rate", "1gbit", "--trace", "resnet20"]
    argv += ["--forward", "20ms", "--backward", "40ms", "--network", network, "--json"]
    argv += ["--runtime", "torch-ddp,torch-ddp-tuned,naive,wfbp,optimal", *where]
    argv += ["--repeats", "2", "--iterations", "1", "--warmup", "2", "--output", str(tmp_path)]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["runtime"] for row in rows] == argv[argv.index("--runtime") + 1].split(",")
    for row in rows:
        assert row["correct"]
        assert (row["trace"], row["nodes"], row["rate"]) == ("resnet20", 2, "1gbit")
        assert row["iteration_s"] >= 0.06
        assert row["predicted_s"] >= 0.06
        assert len(row["repeats_s"]) == 2
    assert rows[0]["speedup"] == 1.0
    (cases, answers), _ = asked  # the sweep, and then all of them
    caps = {case.runtime: case.bucket_cap_mb for case in cases}
    assert list(caps.values()) == swept_caps_mb(load_trace("resnet20").nbytes.sum())
    times = {runtime: median_s(answers, runtime) for runtime in caps}
    assert rows[1]["bucket_cap_mb"] == caps[min(times, key=times.get)]
    run = RunFolder(tmp_path / "resnet20-2-nodes").read()
    assert [row.runtime for row in run.results.rows] == [row["runtime"] for row in rows]
    assert run.plans["wfbp"].lengths == (1,) * 65
    messages = [s for s in run.measured["naive"][0].spans if s.lane == "communication"]
    assert len(messages) == 65
    assert min(s.start_s for s in messages) >= 0.06


@pytest.mark.long
def test_training_beside_both_passes_and_in_loops(tmp_path):
    argv = ["bench", "training", "--trace", "resnet20", "--json"]
    argv += ["--forward", "20ms", "--backward", "40ms", "--network", "k80-10gbe"]
    argv += ["--runtime", "sharded,bsp-reduce-broadcast,bsp-allreduce:mst,bsp-overlap:exchange"]
    argv += ["--repeats", "1", "--iterations", "1", "--warmup", "2", "--output", str(tmp_path)]
    done = launched("-m", "gradweave", *argv)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["runtime"] for row in rows] == argv[argv.index("--runtime") + 1].split(",")
    assert all(row["correct"] and row["predicted_s"] >= 0.06 for row in rows)
    assert [row["messages"] for row in rows[1:]] == [1, 1, 43]
    run = RunFolder(tmp_path / "resnet20-1-nodes").read()
    assert run.plans["sharded"].passes == "both"
    labels = {s.label.split()[0] for s in run.measured["sharded"][0].spans}
    assert labels == {"forward", "backward", "reduce-scatter", "all-gather"}


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["calibrate"], "--nodes is missing"),
        (["calibrate", "--nodes", "2,4"], "a calibration is of one cluster"),
        (["calibrate", "--nodes", "2", "--algorithm", "rign"], "no algorithm 'rign'"),
        (["calibrate", "--nodes", "2", "--algorithm", "rign+bf16"], "no algorithm 'rign+bf16'"),
        (["calibrate", "--nodes", "2", "--algorithm", "ring+int4"], "no compression 'int4'"),
        (["calibrate", "--nodes", "2", "--algorithm", "native+int8"], "take ring+int8"),
        (["bench", "training", "--trace", "resnet20", "--nodes", "1"], "one rank sends no messag"),
        (["bench", "training", "--trace", "resnet20"], "--nodes is missing"),
        (["bench", "collectives", "--nodes", "2,1"], "one rank sends no messages"),
        (["calibrate", "--nodes", "1"], "one rank sends no messages; give --nodes 2 or more"),
        (
            ["bench", "training", "--trace", "resnet20", "--nodes", "2", "--runtime", "fast"],
            "no runtime 'fast'",
        ),
        (
            ["bench", "training", "--trace", "resnet20", "--nodes", "2", "--runtime", "wfbp,wfbp"],
            "a runtime stands twice",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, argv, complaint):
    """Before a cluster is built, which would take longer and print more."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "gradweave._src.lab.Cluster.__enter__", lambda _: pytest.fail("it was built")
    )
    assert main(argv) == 2
    stderr = capsys.readouterr().err
    verbs = argv[: 2 if argv[0] == "bench" else 1]
    assert stderr.startswith(f"gradweave {' '.join(verbs)}: ")
    assert complaint in stderr
    assert stderr.count("\n") == 1

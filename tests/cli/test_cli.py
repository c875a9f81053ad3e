"""What the commands print, and what a mistake looks like: one line, exit code 2, no file."""

import json
import sys

import pytest
from commands import run
from msgspec.structs import replace

from gradweave import Plan, load_trace
from gradweave._src import files
from gradweave._src.cli import main

JOB = ["--trace", "googlenet-k80", "--network", "k80-10gbe"]


def printed_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulate_prints_a_row_for_each_combination(capsys):
    rows = printed_json(
        capsys, "simulate", *JOB, "--workers", "4,64", "--collective", "ring,double-tree"
    )
    assert len(rows) == 2 * 2 * 2
    assert [row["planner"] for row in rows] == ["ddp", "optimal"] * 4
    assert {
        "trace",
        "network",
        "workers",
        "passes",
        "planner",
        "collective",
        "compute_s",
        "iteration_s",
        "exposed_s",
        "overlap",
        "efficiency",
        "messages",
    } <= set(rows[0])
    for row in rows:
        assert row["iteration_s"] == pytest.approx(row["compute_s"] + row["exposed_s"])
        assert row["speedup"] == pytest.approx(row["workers"] * row["efficiency"])


def test_plan_prints_buckets_and_writes_a_plan(capsys, tmp_path):
    output = tmp_path / "plan.json"
    (row,) = printed_json(capsys, "plan", *JOB, "--workers", "64", "--output", str(output))
    plan = files.read(output, Plan)
    plan.check_describes(load_trace("googlenet-k80"))
    assert row["planner"] == "optimal"
    assert row["buckets"] == [list(bucket.tensors) for bucket in plan.buckets]
    assert 0.3 < row["predicted_s"] < 0.4


def test_simulate_compares_passes(capsys):
    job = ["--trace", "resnet50", "--network", "gtopk-1gbe", "--planner", "optimal:0"]
    rows = printed_json(
        capsys, "simulate", *job, "--workers", "4,64,2048", "--passes", "backward,both"
    )
    assert [(row["workers"], row["passes"]) for row in rows] == [
        (workers, passes) for workers in (4, 64, 2048) for passes in ("backward", "both")
    ]
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        assert both["iteration_s"] <= alone["iteration_s"] * (1 + 1e-9)
    assert rows[1]["iteration_s"] < 0.95 * rows[0]["iteration_s"]


def test_a_plan_for_both_passes(capsys, tmp_path):
    output = tmp_path / "plan.json"
    argv = ["plan", *JOB, "--workers", "64", "--passes", "both"]
    (row,) = printed_json(capsys, *argv, "--output", str(output))
    assert row["passes"] == files.read(output, Plan).passes == "both"
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "optimal by ring beside both passes:" in out
    rows = [line.split("│") for line in out.splitlines() if "│" in line]
    assert len(rows) == len(row["buckets"])
    sent, gathered = ([float(cells[place]) for cells in rows] for place in (6, 8))
    assert sent == sorted(sent)
    assert gathered == sorted(gathered, reverse=True)


def test_tables_are_for_people(capsys):
    assert main(["simulate", *JOB, "--workers", "64"]) == 0
    out = capsys.readouterr().out
    assert "googlenet-k80 on k80-10gbe, 4-byte gradients by ring; one worker alone: 308.0 ms" in out
    rows = [line.split("│")[3].strip() for line in out.splitlines() if "│" in line]
    assert rows == ["ddp", "optimal"]
    assert "ddp      as torch's DDP does: a message of 1 MiB, then of 25 MiB\n" in out
    assert "optimal  the fewest messages within 1 % of the optimum" in out
    assert main(["simulate", *JOB, "--workers", "64", "--planner", "fixed:4MiB,optimal:0.05"]) == 0
    out = capsys.readouterr().out
    assert "fixed:4MiB    a message closes once it holds 4MiB\n" in out
    assert "optimal:0.05  the fewest messages within 5 % of the optimum" in out
    assert main(["plan", *JOB, "--workers", "64"]) == 0
    assert "optimal by ring: 314.8 ms an iteration" in capsys.readouterr().out


def test_the_trace_can_be_changed(capsys):
    (row,) = printed_json(
        capsys,
        "simulate",
        *JOB,
        *["--workers", "4", "--planner", "single", "--forward", "1s", "--backward", "2000ms"],
        *["--bytes-per-element", "2", "--parameter-scale", "0.5"],
    )
    (whole,) = printed_json(capsys, "simulate", *JOB, "--workers", "4", "--planner", "single")
    assert row["compute_s"] == pytest.approx(3)
    a_s = 6 * 45.25e-6
    assert row["exposed_s"] - a_s == pytest.approx((whole["exposed_s"] - a_s) / 4, rel=1e-3)


def test_a_sweep_over_widths(capsys):
    rows = printed_json(capsys, "simulate", *JOB, "--workers", "64", "--bytes-per-element", "4,2")
    assert [row["bytes_per_element"] for row in rows] == [4] * 2 + [2] * 2
    assert rows[2]["communication_s"] < rows[0]["communication_s"]


def test_a_network_measured_with_one_number_of_workers_needs_no_number(capsys):
    (row,) = printed_json(
        capsys,
        *["simulate", "--trace", "resnet50", "--network", "cluster1-16xk80-10gbe"],
        *["--planner", "optimal"],
    )
    assert (row["workers"], row["collective"]) == (16, "native")


def test_beyond_a_curve_it_says_so(capsys):
    argv = ["simulate", "--trace", "resnet50", "--network", "mpi-10gbe-measured", "--workers", "8"]
    (row,) = printed_json(capsys, *argv, "--planner", "single")
    assert row["extrapolated_from_bytes"] == 1048576
    assert main([*argv, "--planner", "single"]) == 0
    assert "measured up to 1,048,576 bytes on 8 workers" in capsys.readouterr().err


def test_jitter_makes_it_slower_and_repeats_with_its_seed(capsys):
    argv = ["simulate", *JOB, "--workers", "8", "--planner", "wfbp", "--iterations", "5"]
    (calm,) = printed_json(capsys, *argv)
    (shaky,) = printed_json(capsys, *argv, "--jitter", "0.2", "--seed", "3")
    (again,) = printed_json(capsys, *argv, "--jitter", "0.2", "--seed", "3")
    assert shaky == again
    assert calm["iteration_s"] < shaky["iteration_s"] <= shaky["iteration_p95_s"]


def test_compression_travels_less(capsys):
    argv = ["simulate", "--trace", "alexnet", "--network", "gtopk-1gbe", "--workers", "32"]
    (dense,) = printed_json(capsys, *argv, "--planner", "single")
    (sparse,) = printed_json(capsys, *argv, "--planner", "single", "--compression", "gtopk:0.001")
    assert sparse["compression"] == "gtopk:0.001"
    assert sparse["iteration_s"] < dense["iteration_s"] / 5


def test_selecting_takes_its_time(capsys):
    argv = ["--trace", "alexnet", "--network", "gtopk-1gbe", "--workers", "32"]
    argv += ["--planner", "single", "--compression", "gtopk:0.001"]
    elements = sum(tensor.elements for tensor in load_trace("alexnet").tensors)
    (free,) = printed_json(capsys, "simulate", *argv)
    (dear,) = printed_json(capsys, "simulate", *argv, "--selection", "10ns")
    assert dear["iteration_s"] == pytest.approx(free["iteration_s"] + 1e-8 * elements)
    (planned,) = printed_json(capsys, "plan", *argv, "--selection", "10ns")
    assert planned["predicted_s"] == dear["iteration_s"]


SIMULATE = ["simulate", *JOB, "--workers", "4"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["simulate", *JOB], "--workers is missing"),
        ([*SIMULATE, "--planner", "magic"], "no planner 'magic'; there are ddp, optimal"),
        ([*SIMULATE, "--planner", "optimla"], "no planner 'optimla', did you mean optimal? There"),
        ([*SIMULATE, "--planner", "fixed:25"], "without its unit; write 25MiB, or 25B for bytes"),
        ([*SIMULATE, "--planner", "wfbp,"], "an empty name in 'wfbp,'"),
        ([*SIMULATE, "--passes", "forward"], "no passes 'forward'; there are backward, both"),
        (
            ["plan", "--trace", "vgg16", "--network", "cluster1-16xk80-10gbe", "--passes", "both"],
            "calibrate with --op all-reduce,reduce-scatter,all-gather",
        ),
        ([*SIMULATE, "--collective", "rign"], "all-reduce by 'rign', did you mean ring? There are"),
        ([*SIMULATE, "--collective", "native"], "no formula for all-reduce by 'native'"),
        ([*SIMULATE, "--compression", "gtopk:2"], "density must be above 0 and at most 1, got 2"),
        ([*SIMULATE, "--stragglers", "5"], "5 stragglers among 4 workers"),
        ([*SIMULATE, "--slowdown", "0.5"], "expected a number from 1 to 1000, got '0.5'"),
        ([*SIMULATE, "--forward", "nan"], "'nan' is not a duration; write it as 50us, 0.2ms or"),
        ([*SIMULATE, "--forward", "0s"], "expected a duration above 0, got '0s'"),
        ([*SIMULATE, "--backward", "0.3"], "without its unit; write 0.3s or 0.3ms"),
        ([*SIMULATE, "--selection", "1e-8"], "'1e-8' is not a duration"),
        (["simulate", *JOB, "--workers", "0"], "whole number from 1 to 1000000, got '0'"),
        (["simulate", *JOB, "--workers", "four"], "whole number from 1 to 1000000, got 'four'"),
        (
            ["simulate", *JOB, "--workers", "4..8"],
            "got '4..8'; commas separate several, as in 4,8",
        ),
        (["simulate", *JOB, "--workers", "9" * 5000], "whole number from 1 to 1000000, got '999"),
        (["simulate", *JOB, "--workers", "٤"], "whole number from 1 to 1000000"),
        (
            ["simulate", *JOB, "--work", "4"],
            "simulate: no option --work, did you mean --workers? See gradweave simulate --help",
        ),
        ([*SIMULATE, "--parameter-scale", "1e308"], "expected a number above 0, at most 1e+06"),
        ([*SIMULATE, "--forward", "9" * 400 + "s"], "is not a duration"),
        ([*SIMULATE, "--jitter", "1e200"], "expected a number from 0 to 10"),
        ([*SIMULATE, "--planner", "fixed:" + "9" * 400], "is not a size"),
        ([*SIMULATE, "--planner", "wfbp,optimal:1e308"], "tolerance from 0 to 1"),
        ([*SIMULATE, "--bytes-per-element", "9" * 400], "whole number from 1 to 16"),
        ([*SIMULATE, "--collective", "parameter-server:" + "9" * 5000], "expected 1 to 4 servers"),
        (["plan", *JOB, "--workers", "1", "--collective", "rign"], "no formula for all-reduce by"),
        (["plan", *JOB, "--workers", "4", "--output", "."], "is not a file; name one"),
        (["plan", *JOB, "--workers", "4", "--output", "\0"], "null byte"),
        (["plan", *JOB, "--workers", "4", "--output", ""], "is not a file; name one"),
        (["simulate", *JOB, "--wrokers=4"], "no option --wrokers, did you mean --workers?"),
        (["simulate", *JOB, "-workers", "4"], "no option -workers, did you mean --workers?"),
        (["simulate", "--tarce", "resnet50"], "no option --tarce, did you mean --trace?"),
        (["simulate", *JOB, "--colour", "red"], "no option --colour; see gradweave simulate --h"),
        (["simulate", "--network", "k80-10gbe"], "required: --trace"),
        (
            ["lab", "--nodes", "2", "python", "-c", "1"],
            "no option -c; if it is for python, write -- before python",
        ),
        (["lab", "--nodes", "2", "--rack", "2", "x"], "no option --rack, did you mean --racks?"),
        (["fly"], "no verb 'fly'; there are demo, list"),
        (["simulat", *JOB], "no verb 'simulat', did you mean simulate? There are demo, list"),
        (["--verison"], "no option --verison, did you mean --version? See gradweave --help"),
        (["bench", "trainig"], "bench: no benchmark 'trainig', did you mean training? There are"),
        (
            ["bench", "training", "--runtimes", "x"],
            "training: no option --runtimes, did you mean -",
        ),
        (
            ["simulate", "--trace", "nope", "--network", "k80-10gbe", "--workers", "4"],
            "no file and no shipped trace 'nope'; shipped are alexnet",
        ),
        (
            ["plan", "--trace", "ResNet-50", "--network", "k80-10gbe", "--workers", "4"],
            "no shipped trace 'ResNet-50', did you mean resnet50? Shipped are alexnet",
        ),
        (
            ["plan", "--trace", "resnet50", "--network", "k80_10gbe", "--workers", "4"],
            "no shipped network 'k80_10gbe', did you mean k80-10gbe? Shipped are",
        ),
        (
            ["plan", "--trace", "vgg16", "--network", "cluster1-16xk80-10gbe", "--workers", "8"],
            "for 16 workers, not for 8; `gradweave calibrate` on as many ranks would tell",
        ),
        (["plan", *JOB], "--workers is missing; say how many, such as --workers 4\n"),
        (["plan", *JOB, "--workers", "4,8", "--output", "p.json"], "--output takes one plan"),
        (["plan", *JOB, "--workers", "4", "--output", "no/such/p.json"], "No such file"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, argv, complaint):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(argv)
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.startswith("gradweave")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_names_are_text_and_never_markup(capsys, tmp_path):
    names = ["[/red]x", "blocks[a].w", "smile:smile:"]
    trace = load_trace("alexnet")
    tensors = tuple(replace(t, name=name) for t, name in zip(trace.tensors, names, strict=False))
    files.write(tmp_path / "t.json", replace(trace, name="[bold]odd", tensors=tensors))
    argv = ["plan", "--trace", str(tmp_path / "t.json"), "--network", "k80-10gbe"]
    assert (
        main(
            [*argv, "--workers", "128", "--collective", "parameter-server:100", "--planner", "wfbp"]
        )
        == 0
    )
    out = capsys.readouterr().out
    for text in (*names, "[bold]odd", "parameter-server:100"):
        assert text in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (files.dumps(load_trace("alexnet")), "this is a trace, not a network"),
        ("# Notes\n", "this is not JSON"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(capsys, tmp_path, text, complaint):
    path = tmp_path / "file"
    path.write_text(text)
    argv = ["plan", "--trace", "alexnet", "--network", str(path), "--workers", "4"]
    assert main(argv) == 2
    assert capsys.readouterr().err == f"gradweave plan: {path}: {complaint}\n"


def test_a_model_whose_module_ends_the_process(capsys, tmp_path, monkeypatch):
    """As argparse does, in a script without a guard."""
    (tmp_path / "without_guard.py").write_text("raise SystemExit(2)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["record", "--model", "without_guard:make", "--input", "2x3"]) == 2
    assert capsys.readouterr().err == (
        "gradweave record: importing without_guard ended this process; put what it runs under if "
        '__name__ == "__main__"\n'
    )


def test_a_bad_file_is_named_and_leaves_no_output(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(files.dumps(load_trace("alexnet"))[:-40])
    output = tmp_path / "plan.json"
    argv = ["plan", "--trace", str(trace), "--network", "k80-10gbe", "--workers", "4"]
    assert main([*argv, "--output", str(output)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"gradweave plan: {trace}: not complete JSON")
    assert err.count("\n") == 1
    assert not output.exists()


def test_as_a_program_into_a_closed_pipe():
    """`gradweave … | true` must not print a traceback."""
    command = '"$0" -m gradweave simulate --trace resnet50 --network k80-10gbe --workers 4 | true'
    done = run("bash", "-c", command, sys.executable)
    assert done.stderr == ""

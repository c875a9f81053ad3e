"""What a new user types first: --version, --help, list; and `lab` with another python."""

import json
import sys
from pathlib import Path

import pytest

import gradweave
from gradweave._src import collectives, presets
from gradweave._src.bench.training import check_runtimes, runtime_names
from gradweave._src.cli import VERBS, main
from gradweave._src.cli.bench import BENCHES
from gradweave._src.cli.listing import KINDS
from gradweave._src.compression import COMPRESSION_SUMMARIES, EXCHANGE_NAMES, ROUNDING_NAMES
from gradweave._src.glossary import RUNTIMES
from gradweave._src.planning import PLANNERS, find_planner, planner_summary


def said(capsys, *argv):
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_the_version(capsys):
    assert said(capsys, "--version") == f"gradweave {gradweave.__version__}\n"


def test_help_begins_with_what_it_does_for_a_user(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, "--help").splitlines()
    about = lines.index(
        "Make synchronous data-parallel training in PyTorch fast on the network you have."
    )
    assert about < lines.index("  from gradweave import DistributedDataParallel as DDP")
    listed = [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]
    assert listed == list(VERBS)
    assert listed[:2] == ["demo", "list"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys, verb):
    summary = (VERBS[verb].__doc__ or "").splitlines()[0]
    assert summary in said(capsys, verb, "--help")


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_has_a_sentence_and_an_example(capsys, name):
    summary = (BENCHES[name].__doc__ or "").splitlines()[0]
    assert summary[0].isupper()
    assert summary.endswith(".")
    help_text = said(capsys, "bench", name, "--help")
    assert summary in help_text
    assert f"\n  gradweave bench {name}" in help_text


@pytest.mark.parametrize(
    ("verbs", "takes_several"),
    [
        (["doctor"], False),
        (["calibrate"], False),
        (["bench", "collectives"], True),
        (["bench", "training"], True),
    ],
    ids=str,
)
def test_only_where_several_clusters_are_measured_help_says_so(capsys, verbs, takes_several):
    in_one_line = " ".join(said(capsys, *verbs, "--help").split())
    nodes = "nodes of an emulated cluster"
    assert nodes in in_one_line
    assert (f"{nodes}; several numbers are separated by commas" in in_one_line) == takes_several


def test_everything_is_listed_with_one_line(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    listed = {kind: [row["name"] for row in rows if row["kind"] == kind] for kind in KINDS}
    assert listed == {
        "traces": presets.trace_names(),
        "networks": presets.network_names(),
        "planners": list(PLANNERS),
        "collectives": list(collectives.SUMMARIES),
        "compressions": list(COMPRESSION_SUMMARIES),
        "runtimes": list(RUNTIMES),
    }
    for row in rows:
        assert row["summary"].strip()
        assert "\n" not in row["summary"]


def test_a_new_one_needs_its_line():
    assert set(collectives.SUMMARIES) == {"native", *(name for _, name in collectives.ALGORITHMS)}
    assert set(COMPRESSION_SUMMARIES) == {*ROUNDING_NAMES, *EXCHANGE_NAMES}
    assert set(RUNTIMES) == set(runtime_names())
    for name, planner in PLANNERS.items():
        assert planner_summary(name)
        if planner.example is not None:
            find_planner(f"{name}:{planner.example}")


def test_runtimes_that_are_listed_are_taken():
    needs = {"powersgd": "powersgd:2", "fixed": "fixed:1MiB"}
    check_runtimes([needs.get(name, name) for name in runtime_names()])


def test_one_kind_as_a_table(capsys):
    assert main(["list", "planners"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "planners, for --planner"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in rows] == list(PLANNERS)
    summary = dict(rows)["optimal"]
    assert summary.startswith("the fewest messages within 1 % of the optimum")
    assert summary.endswith(" (optimal:0.05)")


def test_a_trace_in_one_line(capsys):
    assert main(["list", "traces", "--json"]) == 0
    lines = {row["name"]: row["summary"] for row in json.loads(capsys.readouterr().out)}
    assert lines["googlenet-k80"].startswith("64 gradients, 53.5 MB, forward ")
    assert lines["googlenet-k80"].endswith("batch of 64, measured times")


def test_no_such_list(capsys):
    with pytest.raises(SystemExit):
        main(["list", "planer"])
    assert "no list of 'planer', did you mean planners? There are" in capsys.readouterr().err


@pytest.fixture
def in_lab(monkeypatch, tmp_path):
    """Commands that `gradweave lab` would run; programs of tmp_path come first on the PATH."""
    ran = []

    def run_command(spec, command, *, loopback):
        ran.append(command)
        return 0

    monkeypatch.setattr("gradweave._src.lab.run_command", run_command)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return ran


def other_python(folder, *, exit_code):
    program = folder / "python"
    program.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    program.chmod(0o755)
    return program


def test_lab_warns_of_a_python_without_gradweave(capsys, in_lab, tmp_path):
    program = other_python(tmp_path, exit_code=1)
    assert main(["lab", "--nodes", "2", "--", "python", "train.py"]) == 0
    assert capsys.readouterr().err == (
        f"note: python is {program}, which has no gradweave; write {sys.executable} instead, or "
        "activate its environment first\n"
    )
    assert in_lab == [["python", "train.py"]]


def test_lab_is_silent_where_python_has_gradweave(capsys, in_lab, tmp_path, monkeypatch):
    other_python(tmp_path, exit_code=0)
    assert main(["lab", "--nodes", "2", "--", "python", "train.py"]) == 0
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["lab", "--nodes", "2", "--", "python", "train.py"]) == 0
    assert main(["lab", "--nodes", "2", "--", "true"]) == 0
    assert capsys.readouterr().err == ""
    assert len(in_lab) == 3

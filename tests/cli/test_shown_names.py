"""Names from files in the terminal: text, in any encoding, and never what a terminal obeys."""

import ast
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace
from mutations import LONG, NAMES

import gradweave._src.cli
from gradweave import load_network, load_trace
from gradweave._src import files
from gradweave._src.cli import main, tables
from gradweave._src.cli.bars import Bar, print_bars
from gradweave._src.cli.bench_training import _run_folder

VERBS = [
    ["plan", "--planner", "optimal"],
    ["simulate"],
    ["advise"],
]
hostile = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


def of_name(folder, name):
    """The options of a job whose files call everything so."""
    trace = load_trace("alexnet")
    tensors = tuple(replace(t, name=f"{name}{i}") for i, t in enumerate(trace.tensors))
    files.write(folder / "trace.json", replace(trace, name=name, source=name, tensors=tensors))
    network = replace(load_network("k80-10gbe"), name=name, source=name)
    files.write(folder / "network.json", network)
    job = ["--trace", folder / "trace.json", "--network", folder / "network.json"]
    return [*map(str, job), "--workers", "4"]


def is_harmless(text):
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_tables_show_names_as_text(capsys, tmp_path, verb):
    lines = {}
    for which in ("plain", *NAMES.values()):
        assert main([*verb, *of_name(tmp_path, which)]) == 0, which
        told = capsys.readouterr()
        assert is_harmless(told.out), which
        assert is_harmless(told.err), which
        assert max(map(len, told.out.split("\n"))) < LONG / 2, which
        lines[which] = told.out.count("\n")
        assert lines[which] >= lines["plain"], which


@hostile
def test_json_has_names_exactly(capsys, tmp_path, name):
    assert main(["plan", *of_name(tmp_path, name), "--json"]) == 0
    told = capsys.readouterr().out
    assert is_harmless(told)
    (row,) = json.loads(told)
    assert (row["trace"], row["buckets"][0][0]) == (name, f"{name}0")


@hostile
def test_mistakes_are_one_line_whatever_they_name(capsys, tmp_path, name):
    assert main(["plan", *of_name(tmp_path, name), "--collective", name.partition(",")[0]]) == 2
    (line, end) = capsys.readouterr().err.split("\n")
    assert line.startswith("gradweave plan: ")
    assert line.isprintable()
    assert len(line) < LONG / 2
    assert not end


@hostile
def test_files_of_any_name_are_named_safely(capsys, tmp_path, name):
    """In a mistake; a folder of such a name is somebody's own."""
    path = tmp_path / name.replace("/", "").replace("\0", "")[:200]
    path.write_text("{}")
    assert main(["plan", "--trace", str(path), "--network", "k80-10gbe", "--workers", "4"]) == 2
    assert is_harmless(capsys.readouterr().err)


@hostile
def test_options_that_are_not_are_named_safely(capsys, name):
    with pytest.raises(SystemExit):
        main(["simulate", f"--{name}", "x"])
    said = capsys.readouterr().err
    assert is_harmless(said)
    assert len(said) < LONG / 2


ARGUMENTS = [
    *NAMES.values(),
    *("a\udcffb", "", ",", "-1", "0", "nan", "1e400", "9" * LONG),
    *("fixed:", "fixed:-1MiB", "optimal:2", "topk:2", "1e-320s", "1e30s", "1e300gbit"),
]


def options_of(verb):
    """Those that take a value, without the one that says where to write."""
    parser = gradweave._src.cli._parser().verbs[verb]
    parser.complete()
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and action.dest != "output"
    ]


def answer(*given):
    try:
        return main(given)
    except SystemExit as ended:  # argparse does not like it
        return ended.code


@pytest.mark.parametrize(
    "verb", ["plan", pytest.param("simulate", marks=pytest.mark.long), "advise"]
)
def test_any_argument_gives_an_answer_or_one_line(capsys, verb):
    """Seconds, for there are hundreds."""
    job = ["--trace", "alexnet", "--network", "k80-10gbe", "--workers", "4"]
    refused = 0
    for option, value in product(options_of(verb), ARGUMENTS):
        code = answer(verb, *job, f"{option}={value}")
        told = capsys.readouterr()
        assert is_harmless(told.out), (option, value)
        assert is_harmless(told.err), (option, value)
        assert len(told.err) < LONG / 2, (option, value)
        assert code in {0, 2}, (option, value)
        if code == 2:
            refused += 1
            assert told.err.count("\n") == 1, (option, value)
    assert refused > 100


@hostile
def test_bars_and_notes_show_names_as_text(capsys, name):
    print_bars([Bar(name, 1.0, "1.0 ms", name, "blue")])
    tables.print_note(name)
    tables.print_line(name)
    told = capsys.readouterr()
    assert is_harmless(told.out)
    assert is_harmless(told.err)


@hostile
def test_progress_is_called_by_any_name(monkeypatch, name):
    """On a terminal, which reads what stands in brackets as a style otherwise."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with tables.progress_bar(1, doing=f"{name}[/nothing]") as advance:
        advance()


@hostile
def test_a_benchmark_writes_into_its_folder(tmp_path, name):
    trace = replace(load_trace("alexnet"), name=name)
    run = _run_folder(tmp_path / "out", trace, 2).path
    assert run.parent == tmp_path / "out"
    assert run.resolve().parent == (tmp_path / "out").resolve()
    run.mkdir(parents=True)


def prints(path):
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]


def test_lines_are_printed_in_one_place():
    """By functions that know what a terminal must not see; the demo has names of its own alone."""
    printing = {p.name for p in Path(gradweave._src.cli.__file__).parent.glob("*.py") if prints(p)}
    assert printing == {"__init__.py", "tables.py", "demo.py"}


GRADWEAVE = [sys.executable, "-m", "gradweave"]
LIST = [*GRADWEAVE, "list", "traces"]
ON_FOUR = ["--network", "k80-10gbe", "--workers", "4"]


def run(command, **given):
    environment = {**os.environ, **given.pop("env", {})}
    return subprocess.run(command, env=environment, check=False, **given)


def test_a_terminal_that_knows_ascii_alone(tmp_path):
    trace = replace(load_trace("alexnet"), name="gewichte-größe-\U0001f600")
    files.write(tmp_path / "trace.json", trace)
    simulate = [*GRADWEAVE, "simulate", *ON_FOUR, "--trace", str(tmp_path / "trace.json")]
    environment = {"PYTHONIOENCODING": "ascii"}
    done = run(simulate, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gewichte-gr\xf6\xdfe-\U0001f600" in done.stdout
    done = run([*simulate, "--json"], capture_output=True, env=environment)
    assert {row["trace"] for row in json.loads(done.stdout)} == {trace.name}


@pytest.mark.parametrize("closed", ["1", "2", "1 2", "0 1 2"])
def test_streams_that_are_closed(tmp_path, closed):
    """What is written goes to its file, not to whatever got the number of a closed stream."""
    output = tmp_path / "plan.json"
    plan = [*GRADWEAVE, "plan", *ON_FOUR, "--trace", "alexnet", "--output", str(output)]
    closing = " ".join(f"{number}>&-" for number in closed.split())
    done = run(["sh", "-c", f'exec "$@" {closing}', "sh", *plan], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert files.read(output, gradweave.Plan).planner == "optimal"


def test_a_disk_that_is_full_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = run(LIST, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"gradweave list: [Errno 28] No space left on device\n"


def test_whoever_has_seen_enough_is_not_told_more():
    done = run(["sh", "-c", '"$@" | head -1', "sh", *LIST], capture_output=True)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""

"""`gradweave report`: what it writes and prints, and what a mistake looks like."""

import json
import shutil

import pytest
from msgspec.structs import replace

from gradweave import RequestError
from gradweave._src import files
from gradweave._src.cli import main
from gradweave._src.report.folders import read_folders
from gradweave._src.results import Losses, LossSeries, Results, StageBegin
from gradweave._src.timeline import Timeline


def test_it_writes_a_page_and_a_trace(capsys, tmp_path, small_run):
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", str(small_run), "--output", str(page), "--perfetto", str(trace)]) == 0
    out = capsys.readouterr().out
    assert f"small: written to {page} (" in out
    assert f"small: written to {trace} (" in out
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_it_prints_json(capsys, tmp_path, small_run):
    page = tmp_path / "report.html"
    assert main(["report", str(small_run), "--output", str(page), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["run"] == "small"
    assert row["workers"] == 4
    assert row["runtimes"][-1] == "optimal"
    assert (row["output"], row["perfetto"]) == (str(page), None)


def test_a_folder_of_runs_is_all_of_them(tmp_path, small_run):
    for name in ("b", "a"):
        shutil.copytree(small_run, tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [folder.name for folder in read_folders([tmp_path])] == ["a", "b"]


def test_folders_of_benchmarks_are_looked_into(tmp_path, small_run):
    shutil.copytree(small_run, tmp_path / "mine")
    for name in ("alexnet-2-nodes", "alexnet-4-nodes", ".hidden"):
        shutil.copytree(small_run, tmp_path / "20250101-120000" / name)
    found = [folder.name for folder in read_folders([tmp_path])]
    assert found == ["alexnet-2-nodes", "alexnet-4-nodes", "mine"]


def broken_run(kind, path):
    results = files.read(path / "results.json", Results)
    match kind:
        case "no results":
            (path / "results.json").unlink()
        case "no rows":
            files.write(path / "results.json", replace(results, rows=()))
        case "twice":
            files.write(path / "results.json", replace(results, rows=results.rows * 2))
        case "no time":
            rows = tuple(replace(row, iteration_s=0.0) for row in results.rows)
            files.write(path / "results.json", replace(results, rows=rows))
        case "empty message":
            timeline = files.read(path / "single" / "predicted.json", Timeline)
            *spans, last = timeline.spans
            changed = replace(timeline, spans=(*spans, replace(last, tensors=())))
            files.write(path / "single" / "predicted.json", changed)
        case "no plan":
            (path / "optimal" / "plan.json").unlink()
        case "half a file":
            text = (path / "trace.json").read_text()
            (path / "trace.json").write_text(text[: len(text) // 2])
        case "other tensors":
            timeline = files.read(path / "optimal" / "measured.json", Timeline)
            *spans, last = timeline.spans
            stranger = replace(last, tensors=("stranger",))
            changed = replace(timeline, spans=(*spans, stranger))
            files.write(path / "optimal" / "measured.json", changed)
        case "bad losses":
            text = (path / "losses.json").read_text()
            (path / "losses.json").write_text(text.replace('"losses": [', '"losses": [1.0, '))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("no results", "has no results.json; name a folder of a run that ended"),
        ("no rows", "rows: empty; there is nothing to report"),
        ("twice", "runtime 'torch-ddp' stands twice"),
        ("no time", "runtime 'torch-ddp' has an iteration without length"),
        ("empty message", "runtime 'single' has a message without tensors"),
        ("no plan", "plan.json"),
        ("half a file", "not complete JSON"),
        ("other tensors", "'optimal' sends 'stranger', which trace 'drawn' has not"),
        ("bad losses", "steps, losses and wall_s must be equally many"),
    ],
)
def test_a_bad_folder_is_one_line(capsys, tmp_path, small_run, kind, complaint):
    path = tmp_path / "run"
    shutil.copytree(small_run, path)
    broken_run(kind, path)
    assert_one_line(capsys, tmp_path, [str(path)], complaint)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere"], "no folder 'nowhere'; name the folder of a run"),
        ([], "the following arguments are required: RUN"),
        (["RUN", "--perfetto", "page.html"], "name the same file; give each its own"),
        (["RUN", "--output", "no/such/folder/page.html"], "No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, small_run, argv, complaint):
    asked = [str(small_run) if word == "RUN" else word for word in argv]
    assert_one_line(capsys, tmp_path, asked, complaint)


def assert_one_line(capsys, tmp_path, argv, complaint):
    page = tmp_path / "page.html"
    output = [] if "--output" in argv else ["--output", str(page)]
    if "--perfetto" in argv:
        argv = [str(page) if word == "page.html" else word for word in argv]
    try:
        code = main(["report", *argv, *output])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert captured.err.startswith("gradweave report: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not page.exists()


def test_losses_come_back_as_they_were(small_run):
    losses = files.read(small_run / "losses.json", Losses)
    assert files.loads(files.dumps(losses), Losses, origin="text") == losses
    text = '"schema": "gradweave.losses/2"'
    assert text in (small_run / "losses.json").read_text()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": (0, 0)}, "steps must increase"),
        ({"steps": (-1, 0)}, "steps must increase"),
        ({"wall_s": (2.0, 1.0)}, "wall_s must not decrease"),
        ({"losses": (1.0, float("nan"))}, "must be finite"),
        ({"losses": ()}, "equally many and at least one, got 2, 0 and 2"),
        ({"label": ""}, "label must not be empty"),
        ({"stages": (StageBegin("trying", 1), StageBegin("settled", 1))}, "one after the other"),
        ({"stages": (StageBegin("trying", -1),)}, "one after the other"),
    ],
)
def test_losses_check_themselves(change, complaint):
    good = {"label": "a", "steps": (0, 1), "losses": (2.0, 1.0), "wall_s": (0.0, 1.0)}
    with pytest.raises(RequestError, match=complaint):
        LossSeries(**{**good, **change})


def test_labels_of_losses_differ(small_run):
    one, _ = files.read(small_run / "losses.json", Losses).series
    with pytest.raises(RequestError, match="'dense' stands twice"):
        Losses(series=(one, one))
    with pytest.raises(RequestError, match="series must not be empty"):
        Losses(series=())

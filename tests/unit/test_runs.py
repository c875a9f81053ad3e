"""The folder of a run: predictions first, everything back as it was."""

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradweave import FormatError, RequestError, make_plan, simulate
from gradweave._src import files
from gradweave._src.phases import Phases
from gradweave._src.results import Losses, LossSeries, Result, Results, StageBegin
from gradweave._src.runs import Prediction, Run, RunFolder
from gradweave._src.training_record import Account, Steps

GOLDEN = Path(__file__).parents[1] / "golden"


def result(runtime):
    return Result(
        trace="small",
        runtime=runtime,
        workers=2,
        nodes=2,
        ranks_per_node=1,
        rate=None,
        iteration_s=2.0,
        predicted_s=1.0,
        prediction_error=-0.5,
        compute_s=1.0,
        exposed_s=1.0,
        messages=1,
        speedup=None,
        repeats_s=(2.0,),
        correct=True,
        bucket_cap_mb=None,
    )


def test_a_run_comes_back_as_it_was(tmp_path, small_trace, linked_network):
    runtimes = ["single", "fixed:1KiB"]
    plans = {
        name: make_plan(small_trace, linked_network, workers=2, planner=name) for name in runtimes
    }
    timelines = {
        name: simulate(small_trace, plan, linked_network, workers=2) for name, plan in plans.items()
    }
    folder = RunFolder(tmp_path / "new" / "run")
    folder.begin(small_trace, linked_network, runtimes)
    for name in runtimes:
        folder.predict(Prediction(runtime=name, plan=plans[name], timeline=timelines[name]))
    with pytest.raises(
        FormatError, match=r"has no results\.json; name a folder of a run that ended"
    ):
        folder.read()
    results = Results(command="made up", rows=tuple(result(name) for name in runtimes))
    by_rank = {name: (timeline, timelines["single"]) for name, timeline in timelines.items()}
    folder.finish(results, by_rank)
    run = folder.read()
    assert (run.trace, run.network, run.results) == (small_trace, linked_network, results)
    assert run.plans == plans
    assert run.predicted == timelines
    assert run.measured == by_rank


@pytest.fixture
def training(small_trace, linked_network):
    """Of two ranks, as a wrapper keeps it."""
    plan = make_plan(small_trace, linked_network, workers=2, planner="single")
    timeline = simulate(small_trace, plan, linked_network, workers=2)
    phases = Phases(input_s=1.0, forward_s=2.0, backward_s=3.0, network_s=4.0)
    return Run(
        trace=small_trace,
        network=linked_network,
        results=Results(command="train.py", rows=(result("gradweave:rounded"),)),
        plans={"gradweave:rounded": plan},
        predicted={"gradweave:rounded": timeline},
        measured={"gradweave:rounded": (timeline, timeline)},
        steps=Steps(step_s=(1.0,), stages=(StageBegin("settled", 0),), phases=(phases, None)),
        account=files.read(GOLDEN / "account-1.json", Account),
    )


LOSSES = Losses(series=(LossSeries(label="a", steps=(0,), losses=(2.0,), wall_s=(1.0,)),))


def names_in(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_a_training_comes_back_as_it_was(tmp_path, training):
    folder = RunFolder(tmp_path / "new" / "run")
    folder.write(training, LOSSES)
    assert folder.read() == training
    assert files.read(folder.path / "losses.json", Losses) == LOSSES
    of_runtime = ("plan.json", "predicted.json", "measured.json", "measured-1.json")
    assert names_in(folder.path) == {
        *("trace.json", "network.json", "results.json", "steps.json", "findings.json"),
        "losses.json",
        *(f"gradweave-rounded/{name}" for name in of_runtime),
    }


def test_a_training_may_know_little(tmp_path, training):
    little = replace(training, network=None, predicted={}, measured={}, account=None)
    folder = RunFolder(tmp_path)
    folder.write(training, LOSSES)
    folder.write(little)  # of what was there nothing is left
    assert folder.read() == little
    assert names_in(tmp_path) == {
        *("trace.json", "results.json", "steps.json"),
        "gradweave-rounded/plan.json",
    }


def test_what_else_is_in_the_folder_stays(tmp_path, training):
    (tmp_path / "checkpoint.pt").touch()
    (tmp_path / "gradweave-rounded").mkdir()
    (tmp_path / "gradweave-rounded" / "notes.txt").touch()
    for _ in range(2):
        RunFolder(tmp_path).write(training)
    assert {"checkpoint.pt", "gradweave-rounded/notes.txt"} <= names_in(tmp_path)


PARTS = ["trace.json", "network.json", "results.json", "steps.json", "findings.json", "losses.json"]
OF_RUNTIMES = ["plan.json", "predicted.json", "measured.json"]


@pytest.mark.parametrize("text", ["{}", '{"mine": 1}', '{"schema": "theirs/1"}', "not JSON"])
@pytest.mark.parametrize("name", [*PARTS, *(f"gradweave-rounded/{one}" for one in OF_RUNTIMES)])
def test_what_others_keep_is_left_alone(tmp_path, training, name, text):
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text(text)
    told = f"{theirs} is in the way and of no run; give a new folder, or one that a run was kept in"
    with pytest.raises(RequestError) as caught:
        RunFolder(tmp_path).write(training)
    assert str(caught.value) == told
    with pytest.raises(RequestError, match="is in the way and of no run"):
        RunFolder(tmp_path).begin(training.trace, training.network, list(training.plans))
    assert theirs.read_text() == text
    assert names_in(tmp_path) == {name}


def test_a_benchmark_that_was_stopped_is_replaced(tmp_path, training):
    RunFolder(tmp_path).begin(training.trace, training.network, list(training.plans))
    RunFolder(tmp_path).write(training)
    assert RunFolder(tmp_path).read() == training


@pytest.mark.parametrize("left", [".hidden", ".folder.1234.partial/trace.json"])
def test_a_folder_that_nobody_else_uses(tmp_path, training, left):
    """The latter is what a write leaves that was killed before it moved anything."""
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    RunFolder(tmp_path).write(training)
    assert RunFolder(tmp_path).read() == training


class Stopped(KeyboardInterrupt):
    pass


def stop_when_moving(monkeypatch, folder, after):
    """Stop at a call that changes something, after so many of them since moving has begun."""
    calls, forget, has_begun = count(), RunFolder._forget, []

    def begin(*args):
        has_begun.append(True)
        forget(*args)

    monkeypatch.setattr(RunFolder, "_forget", begin)

    def stopping(makes):
        def call(path, *args, **kwargs):
            if has_begun and next(calls) == after:
                raise Stopped
            return makes(path, *args, **kwargs)

        return call

    for name in ("mkdir", "replace", "unlink"):
        monkeypatch.setattr(Path, name, stopping(getattr(Path, name)))


@pytest.mark.parametrize("was_there", ["nothing", "a benchmark", "a training"])
def test_whoever_is_stopped_while_moving_can_save_again(tmp_path, training, monkeypatch, was_there):
    """At each call in turn. What is there meanwhile is a whole run, old or new, or none."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    old = replace(training, results=replace(training.results, command="older"))
    if was_there == "a benchmark":
        old = replace(old, steps=None, account=None)
    is_whole = False
    for stopped_at in count():
        folder = RunFolder(tmp_path / f"{stopped_at}")
        if was_there != "nothing":
            folder.write(old, LOSSES)
        with monkeypatch.context() as patched, suppress(Stopped):
            stop_when_moving(patched, folder.path, stopped_at)
            folder.write(training, LOSSES)
            is_whole = True
        if (folder.path / "results.json").is_file():
            assert folder.read() in (old, training)
        fewer = {name: timelines[:1] for name, timelines in training.measured.items()}
        folder.write(replace(training, measured=fewer))
        assert folder.read().measured == fewer
        assert not [name for name in names_in(folder.path) if name.endswith("measured-1.json")]
        folder.write(training)
        assert folder.read() == training
        if is_whole:
            break
    assert stopped_at > 20  # ten files, some folders, and what is forgotten


@pytest.mark.parametrize("fails_at", ["trace.json", "plan.json", "measured-1.json", "results.json"])
def test_a_failed_write_leaves_the_run_that_was_there(tmp_path, training, monkeypatch, fails_at):
    folder = RunFolder(tmp_path)
    folder.write(training, LOSSES)
    before = names_in(tmp_path)
    write = files.write

    def full(path, value):
        if path.name == fails_at:
            raise OSError(28, "No space left on device", str(path))
        write(path, value)

    monkeypatch.setattr(files, "write", full)
    other = replace(training, results=replace(training.results, command="another"))
    with pytest.raises(OSError, match="No space left"):
        folder.write(other)
    assert folder.read() == training
    assert names_in(tmp_path) == before


def test_a_benchmark_takes_the_place_of_a_training(tmp_path, training):
    folder = RunFolder(tmp_path)
    folder.write(training)
    folder.begin(training.trace, training.network, list(training.plans))
    with pytest.raises(FormatError, match=r"has no results\.json"):
        folder.read()
    name = "gradweave:rounded"
    folder.predict(
        Prediction(runtime=name, plan=training.plans[name], timeline=training.predicted[name])
    )
    folder.finish(training.results, training.measured)
    assert folder.read() == replace(training, steps=None, account=None)


def test_a_file_where_a_folder_is_to_be_is_left_alone(tmp_path, training):
    """And so is the run that was there."""
    folder = RunFolder(tmp_path)
    folder.write(training)
    (tmp_path / "torch-ddp").write_text("mine")
    (row,) = training.results.rows
    other = replace(training.results, rows=(replace(row, runtime="torch-ddp"),))
    with pytest.raises(RequestError, match="torch-ddp is in the way and no folder; give a new"):
        folder.write(replace(training, results=other))
    assert folder.read() == training


def test_a_benchmark_of_fewer_ranks_leaves_none_of_the_others(tmp_path, training):
    folder, (name,) = RunFolder(tmp_path), training.plans
    folder.write(
        training, Losses(series=(LossSeries(label="a", steps=(0,), losses=(1.0,), wall_s=(1.0,)),))
    )
    predicted = Prediction(
        runtime=name, plan=training.plans[name], timeline=training.predicted[name]
    )
    for ranks in (3, 1, 3, 0):
        folder.begin(training.trace, training.network, [name])
        folder.predict(predicted)
        timelines = training.measured[name][:1] * ranks
        folder.finish(training.results, {name: timelines} if timelines else {})
        assert folder.read().measured.get(name, ()) == timelines
    assert "losses.json" not in names_in(tmp_path)


def test_a_benchmark_that_is_refused_leaves_the_run_that_was_there(tmp_path, training):
    folder = RunFolder(tmp_path)
    folder.write(training, LOSSES)
    theirs = tmp_path / "wfbp" / "plan.json"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(RequestError, match="is in the way and of no run"):
        folder.begin(training.trace, training.network, [*training.plans, "wfbp"])
    assert theirs.read_text() == "mine"
    assert folder.read() == training


@pytest.mark.parametrize("name", ["network.json", "single/predicted.json"])
def test_a_benchmark_knows_it_all(tmp_path, small_trace, linked_network, name):
    plan = make_plan(small_trace, linked_network, workers=2, planner="single")
    timeline = simulate(small_trace, plan, linked_network, workers=2)
    folder = RunFolder(tmp_path)
    folder.begin(small_trace, linked_network, ["single"])
    folder.predict(Prediction(runtime="single", plan=plan, timeline=timeline))
    folder.finish(Results(command="made up", rows=(result("single"),)), {"single": [timeline]})
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=Path(name).name):
        folder.read()

"""`gradweave demo`, made small: every part of it, in seconds; and what it says of its numbers."""

import json
import re
import sys

import pytest
from msgspec.structs import replace
from result_rows import row

from gradweave._src.cli import demo, main
from gradweave._src.cli.bars import Bar, print_bars
from gradweave._src.lab import ClusterSpec
from gradweave._src.plan import merge
from gradweave._src.presets import load_trace
from gradweave._src.results import LossSeries, StageBegin
from gradweave._src.runs import Prediction
from gradweave._src.timeline import Span, Timeline


@pytest.fixture
def small(monkeypatch):
    runtimes = ("torch-ddp", "gradweave", "mgwfbp", "optimal", "gtopk")
    monkeypatch.setattr(demo, "SPEC", ClusterSpec(nodes=2, rate="1gbit"))
    monkeypatch.setattr(demo, "REAL_SPEC", ClusterSpec(nodes=2, rate="200mbit"))
    monkeypatch.setattr(
        demo, "REAL", replace(demo.REAL, least_steps=8, batch_size=2, steps_when_settled=2)
    )
    monkeypatch.setattr(demo, "RUNTIMES", runtimes)
    monkeypatch.setattr(
        demo, "SETTINGS", replace(demo.SETTINGS, runtimes=runtimes, iterations=1, repeats=1)
    )
    monkeypatch.setattr(demo, "TRACE", "resnet20")
    monkeypatch.setattr(demo, "PARAMETER_SCALE", 1.0)
    monkeypatch.setattr(demo, "FORWARD_S", 0.01)
    monkeypatch.setattr(demo, "BACKWARD_S", 0.02)


@pytest.mark.long
def test_the_demo(capsys, small, tmp_path):
    """A minute: four jobs import torch, and two wrappers plan for real."""
    assert main(["demo", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    parts = ["1. What one", "2. How", "3. Real training", "4. resnet20 again", "5. The page"]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    bars = said[places[0] : places[1]]
    order = ["torch DDP", "Gradweave by itself", "computing alone"]
    assert [bars.index(name) for name in order] == sorted(bars.index(name) for name in order)
    assert bars.count(" ms") == 3
    assert "Measured: 65 gradients" in said[places[1] : places[2]]
    assert re.search(r"settled .* \d+ to \d+", said[places[2] : places[3]])
    table = said[places[3] :].split("└")[0]
    assert "gradweave" in table
    assert "gtopk" not in table
    assert "Apart, because it changes the training: gtopk" in said
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<h2>([^<]+)</h2>", page) == ["resnet20", "small-cnn", "What if…", "Names"]
    first, second = page.split('id="run-2"')
    assert "Whether it still learns" not in first
    assert "Whether it still learns" in second


def test_bars_are_as_long_as_what_they_stand_for(capsys):
    print_bars([Bar("a", 4.0, "4 ms", "", "red"), Bar("[b]", 1.0, "1 ms", "less", "green")])
    lines = capsys.readouterr().out.splitlines()
    long, short = (line.count("█") for line in lines)
    assert long > 20
    assert abs(long / 4 - short) <= 1
    assert "[b]" in lines[1]  # a name is text, never markup
    assert all(len(line) <= 80 for line in lines)


def test_why_two_planners_are_close():
    optimal = row("optimal", 0.479, 0.4557, messages=3, repeats_s=(0.475, 0.490))
    mgwfbp = row("mgwfbp", 0.469, 0.4543, messages=27)
    said = demo.close_or_not(optimal, mgwfbp)
    assert "the fewest messages within 1 % of the optimum (3; mgwfbp 27)" in said
    assert "mgwfbp takes 0.3% less than optimal; measured, 2.1% less" in said
    assert said.endswith("no more than rounds of one and the same differ (3.2%): noise.")


def test_why_two_planners_are_not_close():
    said = demo.close_or_not(
        row("optimal", 0.46, 0.455, messages=3), row("mgwfbp", 0.52, 0.51, messages=27)
    )
    assert "measured, 13.0% more, more than" in said
    assert "not optimal (docs/merging.md)" in said
    assert "noise" not in said


def series(label, step_s, *, stages=()):
    ends_s, now_s = [], 0.0
    for taken_s in step_s:
        now_s += taken_s
        ends_s.append(now_s)
    return LossSeries(
        label=label,
        steps=tuple(range(len(step_s))),
        losses=tuple(2.0 - 0.1 * step for step in range(len(step_s))),
        wall_s=tuple(ends_s),
        stages=tuple(StageBegin(*stage) for stage in stages),
    )


def test_phases_of_the_training():
    stages = [("not begun", 0), ("recording", 1), ("trying", 8), ("settled", 10)]
    ours = series("gradweave", [9.0] * 5 + [1.0] * 3 + [2.0] * 2 + [0.5] * 3, stages=stages)
    torchs = series("torch-ddp", [9.0] * 5 + [1.0] * 8)
    training = demo.summed_up(
        demo.RealTraining(
            series={"gradweave": ours, "torch-ddp": torchs}, wrong=frozenset(), besides=None
        ),
        rate="200mbit",
    )
    assert [(one.phase, one.first_step, one.last_step) for one in training.phases] == [
        ("planning", 1, 8),
        ("trying", 9, 10),
        ("settled", 11, 13),
    ]
    assert [one.gradweave_s for one in training.phases] == pytest.approx([1.0, 2.0, 0.5])
    assert training.gain == pytest.approx(2.0)
    assert "2.00x as fast as torch's" in demo.what_was_gained(training)
    assert training.largest_difference == 0.0
    slower = replace(training, phases=(replace(training.phases[0], phase="settled"),))
    assert "without a gain" in demo.what_was_gained(slower)


@pytest.fixture
def without_training(monkeypatch):
    """Only what it prints, on loopback: nothing is trained."""
    stages = [("recording", 0), ("settled", 6)]
    real = demo.RealTraining(
        series={
            "gradweave": series("gradweave", [1.0] * 6 + [0.5] * 3, stages=stages),
            "torch-ddp": series("torch-ddp", [1.0] * 9),
        },
        wrong=frozenset(),
        besides=None,
    )
    trace = load_trace("resnet20")
    plan = merge(trace, [len(trace.tensors)], planner="single", collective="native")
    spans = (Span(lane="forward", label="forward", start_s=0.0, end_s=0.1, tensors=()),)
    beside = demo.BesideTorch(
        compute_s=(0.2, 0.2),
        torch_s=(0.3, 0.5),
        ours_s=(0.2, 0.3),
        found=Prediction(runtime="gradweave", plan=plan, timeline=Timeline(spans=spans)),
        explanation="Measured: much.",
    )
    rows = [row("torch-ddp", 0.4, 0.4, messages=2)]
    monkeypatch.setattr(demo, "_has_no_lab", lambda say: True)
    monkeypatch.setattr(demo, "train_beside_torch", lambda *_, **__: beside)
    monkeypatch.setattr(demo, "train_for_real", lambda *_, **__: real)
    monkeypatch.setattr(demo, "_compare", lambda *_: rows)
    monkeypatch.setattr(demo, "_show_planners", lambda _: None)
    monkeypatch.setattr(demo, "_report", lambda folder: folder / "report.html")


def test_the_demo_for_machines(capsys, without_training, tmp_path):
    assert main(["demo", "--output", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_look"] == {
        "torch_ddp_s": 0.4,
        "gradweave_s": 0.25,
        "computing_alone_s": 0.2,
        "speedup": 1.6,
        "explanation": "Measured: much.",
    }
    assert [one["phase"] for one in found["training"]["phases"]] == ["planning", "settled"]
    assert found["training"]["model"] == demo.REAL.model
    assert [one["runtime"] for one in found["runtimes"]] == ["torch-ddp"]
    assert found["report"] == str(tmp_path / "report.html")
    assert found["training"]["rate"] is None  # on loopback


def test_on_loopback_nothing_is_said_of_links(capsys, without_training, tmp_path):
    assert main(["demo", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"5. The page: open {tmp_path / 'report.html'} in a browser." in said
    assert said.startswith("4 workers on this machine, over loopback, train")
    assert "Fashion-MNIST, 4 workers, over loopback" in said
    assert "bit/s" not in said


def test_without_plots_there_is_no_page(capsys, monkeypatch, without_training, tmp_path):
    """That is said before the first minutes."""
    monkeypatch.setitem(sys.modules, "altair", None)
    why = "the demo's page needs altair, which is not installed; pip install 'gradweave[plots]'"
    assert main(["demo", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"There will be no page: {why}.\n")
    assert f"5. The page: none, for {why}.\n" in said
    assert main(["demo", "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None

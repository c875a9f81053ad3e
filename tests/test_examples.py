"""The examples run as their first lines say, until a plan has been found."""

import sys

import commands
import pytest
import torch
from pages import ROOT
from ranks import on_processes

from gradweave import DistributedDataParallel
from gradweave._src.cli import main
from gradweave._src.report.folders import read_folders


def trained(script, *arguments):
    done = commands.launched(ROOT / "examples" / script, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "arguments", "first_loss"),
    [
        ("train_fashion.py", [], "2."),
        ("train_text.py", [str(ROOT / "README.md"), "--width", "48"], "4."),
    ],
)
def test_a_training(script, arguments, first_loss):
    """Seconds: two ranks train until planning has ended."""
    done = trained(script, *arguments, "--steps", "110")  # planning takes 100 of them at most
    assert f"step 0: loss {first_loss}" in done.stdout
    assert "planning ended: " in done.stderr
    assert "(chosen)" in done.stdout
    assert "Planning took " in done.stdout


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        ("gradweave", "\nMeasured: "),
        pytest.param("torch", "'messages': ", marks=pytest.mark.long),
    ],
)
def test_a_training_that_leaves_a_run(wrapper, said, tmp_path, capsys):
    """Seconds: two ranks train; then the page."""
    run, page, trace = tmp_path / "mine", tmp_path / "report.html", tmp_path / "perfetto.json"
    arguments = ["--wrapper", wrapper, "--steps", "80", "--output", str(run)]
    done = trained("train_cluster.py", *arguments)
    assert "2 ranks, loss 2." in done.stdout
    assert said in done.stdout
    (folder,) = read_folders([run])
    assert folder.workers == 2
    ((measured, _),) = folder.run.measured.values()  # of two ranks
    assert {span.lane for span in measured.spans} == {"forward", "backward", "communication"}
    assert len(folder.losses.series[0].losses) == 80
    assert main(["report", str(run), "--output", str(page), "--perfetto", str(trace)]) == 0
    assert "mine" in capsys.readouterr().out
    assert folder.run.trace.tensors[0].name in page.read_text()


class RecordingWriter:
    """Takes what torch.utils.tensorboard.SummaryWriter takes; that one's package is not needed."""

    def __init__(self):
        self.scalars, self.texts = {}, {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag] = (float(scalar_value), global_step)

    def add_text(self, tag, text_string, global_step):
        self.texts[tag] = (text_string, global_step)


def logged(group):
    """The wrapper's own numbers after some steps, and what was logged of them."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tensorboard_metrics import log_metrics  # noqa: PLC0415

    model, writer = DistributedDataParallel(torch.nn.Linear(6, 2)), RecordingWriter()
    for _ in range(30):
        model(torch.ones(3, 6)).mean().backward()
    log_metrics(writer, model, 7)
    return model.metrics(), writer.scalars, writer.texts


def test_live_numbers_for_tensorboard(tmp_path):
    for metrics, scalars, texts in on_processes(2, logged, scratch=tmp_path):
        assert {"step", "step_s", "messages", "stage"} <= metrics.keys()
        assert texts == {"gradweave/stage": (metrics.pop("stage"), 7)}
        assert scalars == {f"gradweave/{name}": (value, 7) for name, value in metrics.items()}

"""Trainings that are compared, and how the page compares them."""

from importlib.resources import files as package_files
from pathlib import Path

import pytest
from convergence import EXPERIMENTS, Everything, page
from msgspec.structs import replace
from ranks import on_processes

from gradweave._src.bench.convergence import Epoch, Outcome, Training
from gradweave._src.bench.convergence_job import Rates, trained

TRAINING = Training(
    experiment="small-cnn",
    model="small-cnn",
    width=2,
    data="fashion-mnist",
    epochs=2,
    batch_size=50,
    learning_rate=0.05,
    warmup_epochs=0.5,
)


@pytest.fixture
def data(tmp_path) -> Path:
    """The shipped images, where the whole data set would be."""
    folder = tmp_path / "data"
    folder.mkdir()
    shipped = Path(str(package_files("gradweave._src.workloads") / "data"))
    (folder / "fashion-mnist").symlink_to(shipped, target_is_directory=True)
    return folder


def each_trained(group, folder, trainings):
    return [trained(training, folder, group) for training in trainings]


@pytest.mark.long
@pytest.mark.usefixtures("compiled_kernels")
def test_trainings_learn_alike_and_ranks_agree(data, tmp_path):
    """Forty steps on two processes each: seconds, of which the wrapper's first import takes most.

    Where everything travels, what is learnt is what dense learns.
    """
    trainings = [
        TRAINING,
        replace(TRAINING, density=1.0, momentum="optimizer's"),
        replace(TRAINING, density=0.01, clip_norm=1.0),
    ]
    ranks = on_processes(2, each_trained, data, trainings, scratch=tmp_path)
    dense, everything, few = ranks[0]
    assert all(outcome.same_weights for rank in ranks for outcome in rank)
    assert [epoch.step for epoch in dense.epochs] == [20, 40]
    for ours, theirs in zip(everything.epochs, dense.epochs, strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-3)
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-2)
    assert few.epochs[-1].train_loss < few.epochs[0].train_loss
    assert few.epochs[-1].test_loss == ranks[1][-1].epochs[-1].test_loss


def test_rates_rise_during_warm_up_and_fall_to_zero():
    rates = Rates(4, 20)
    factors = [rates.factor(step) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == 0


def outcome(density, seed, accuracy):
    epoch = Epoch(step=1, train_loss=1.0, test_loss=2.0, accuracy=accuracy, wall_s=1.0)
    dense = EXPERIMENTS["vgg16"].dense
    return Outcome(
        training=replace(dense, density=density, seed=seed),
        parameters=9,
        epochs=[epoch] * dense.epochs,
        same_weights=True,
    )


def test_the_page_says_what_diverged():
    """Even where not one epoch was finite."""
    nothing = [replace(outcome(density, 0, 0.5), epochs=[]) for density in (None, 0.0005)]
    text = page(
        Everything(
            made_with={"small-cnn": "by hand"}, outcomes=[*nothing, outcome(0.005, 0, 0.48)]
        ),
        "stem",
        full=False,
    )
    assert "| gTop-k 0.0005, masked momentum | 1 | diverged |" in text
    assert "| gTop-k 0.005, masked momentum | 1 | 48.00 % |" in text


def test_the_page_compares_seed_by_seed():
    """A seed that only dense has does not count in the difference."""
    outcomes = [outcome(None, 0, 0.5), outcome(None, 1, 0.9), outcome(0.005, 0, 0.48)]
    text = page(
        Everything(made_with={"small-cnn": "by hand"}, outcomes=outcomes), "stem", full=False
    )
    (row,) = (line for line in text.splitlines() if line.startswith("| gTop-k"))
    assert row.startswith("| gTop-k 0.005, masked momentum | 1 | 48.00 % | -2.00 |")


def test_the_page_compares_trainings_of_one_size():
    small, other = outcome(None, 0, 0.5), outcome(None, 1, 0.9)
    full = replace(EXPERIMENTS["vgg16"].full, epochs=len(other.epochs), seed=1)
    outcomes = [small, replace(other, training=full)]
    text = page(
        Everything(made_with={"small-cnn": "by hand"}, outcomes=outcomes), "stem", full=False
    )
    assert "| dense | 1 | 50.00 % |" in text
    assert "1 of 1 trainings" in text

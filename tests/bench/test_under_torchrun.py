"""Rank 0 asks and all answer, until it is over; `torchrun` itself is in tests/cli/test_bench.py."""

import pytest
from ranks import on_threads

from gradweave import RequestError, load_trace
from gradweave._src.bench.calibration import CalibrationQuestion
from gradweave._src.bench.training import Case, Place, TrainingQuestion
from gradweave._src.bench.under_torchrun import led
from gradweave._src.vocabulary import Way

COMPUTING = TrainingQuestion(
    trace=load_trace("resnet20").rescaled(forward_s=1e-4, backward_s=1e-4, parameter_scale=0.01),
    mode="waiting",
    cases=(Case(runtime="compute"),),
    warmup=2,
    iterations=1,
    repeats=2,
    with_timelines=False,
)
CALIBRATING = CalibrationQuestion(
    name="here", ways=(Way("all-reduce", "native"),), largest_bytes=8192, repeats=1
)


def asked_both(group):
    def lead(ranks):
        answers, steps = [], []
        network = ranks.calibrate(CALIBRATING, advance=lambda: steps.append(1))
        ranks.train(COMPUTING, answers.append)
        ranks.train(COMPUTING, answers.append)
        return ranks.place, network.known_workers, [a.correct for a in answers], bool(steps)

    return led(group, lead)


def test_rank_0_has_the_answers():
    first, second = on_threads(2, asked_both)
    place = Place(nodes=1, ranks_per_node=2, rate=None, workers=2)
    assert first == (place, (2,), [True] * 4, True)
    assert second is None


def failing(group):
    def lead(ranks):
        raise RequestError("no such network")

    if group.rank() != 0:
        return led(group, lead)
    with pytest.raises(RequestError, match="no such network"):
        led(group, lead)
    return None


def test_a_mistake_of_rank_0_ends_all():
    """The others must not wait for what it will never ask."""
    assert on_threads(2, failing) == [None, None]

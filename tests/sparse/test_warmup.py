"""Densities step by step, learning rates beside them, clipping, corrected momentum."""

import numpy as np
import pytest
import torch

from gradweave.errors import RequestError
from gradweave.sparse.settings import GTopK, TopK
from gradweave.sparse.warmup import Densities, MomentumCorrection, clip_local_norm


def test_the_papers_densities_epoch_by_epoch():
    densities = Densities(steps_each=1)
    assert [densities.at(epoch) for epoch in range(6)] == [
        0.25,
        0.0725,
        0.015,
        0.004,
        0.001,
        0.001,
    ]


def test_densities_by_steps():
    densities = Densities(warmup=(0.5, 0.1), final=0.005, steps_each=3)
    assert [densities.at(step) for step in range(8)] == [0.5] * 3 + [0.1] * 3 + [0.005] * 2
    assert Densities(warmup=(), final=0.1).at(0) == 0.1


@pytest.mark.parametrize("wrong", [{"final": 0.0}, {"warmup": (0.1, 1.5)}, {"final": float("nan")}])
def test_densities_that_mean_nothing(wrong):
    with pytest.raises(RequestError, match="density must be above 0 and at most 1"):
        Densities(**wrong)
    with pytest.raises(RequestError, match="steps_each must be at least 1"):
        Densities(steps_each=0)


@pytest.mark.parametrize("make", [Densities, GTopK, TopK])
def test_a_warmup_needs_to_know_what_an_epoch_is(make):
    with pytest.raises(RequestError, match="how many steps an epoch has: density=Densities"):
        make()


def test_learning_rates_rise_with_the_warmup():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, Densities(steps_each=1).learning_rate_factor
    )
    rates = []
    for _ in range(6):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_clipping_before_selection():
    gradient = torch.tensor([3.0, 4.0])
    clip_local_norm(gradient, limit=5.0, ranks=1)
    assert gradient.tolist() == [3.0, 4.0]
    clip_local_norm(gradient, limit=5.0, ranks=4)
    assert gradient.tolist() == pytest.approx([1.5, 2.0])
    nothing = torch.zeros(3, dtype=torch.bfloat16)
    clip_local_norm(nothing, limit=1.0, ranks=4)
    assert nothing.tolist() == [0, 0, 0]
    with pytest.raises(RequestError, match="the norm to clip at must be positive"):
        clip_local_norm(gradient, limit=0.0, ranks=1)


def test_clipping_does_not_hide_what_is_not_finite():
    for bad in (torch.nan, torch.inf):
        gradient = torch.tensor([1.0, bad])
        clip_local_norm(gradient, limit=1.0, ranks=2)
        assert not torch.isfinite(gradient).all()


def velocities(correction, gradients, masked=()):
    """One bucket, step by step; some elements are applied in each step."""
    for gradient in gradients:
        velocity = correction.begin(["w"], torch.tensor(gradient))
        correction.applied(velocity, np.array(masked, np.int32))
        correction.velocities.commit()
    return correction.velocities.value("w").tolist()


def test_momentum_before_selection_is_the_optimizers():
    """Without masking, velocities are those of torch's SGD with momentum on the same gradients."""
    gradients = [[1.0, 2.0], [0.0, -4.0], [3.0, 1.0]]
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    correction = MomentumCorrection({"w": weight}, momentum=0.5, masking=False)
    expected = optimizer.state[weight]["momentum_buffer"].tolist()
    assert velocities(correction, gradients, masked=[0, 1]) == expected


def test_momentum_restarts_where_elements_were_applied():
    correction = MomentumCorrection({"w": torch.zeros(2)}, momentum=0.5)
    assert velocities(correction, [[4.0, 4.0], [0.0, 0.0]], masked=[1]) == [2.0, 0.0]


def test_a_skipped_step_leaves_velocities():
    correction = MomentumCorrection({"w": torch.zeros(2)}, momentum=0.5)
    velocities(correction, [[4.0, 4.0]])
    correction.begin(["w"], torch.tensor([torch.nan, 1.0]))
    correction.velocities.rollback()
    assert correction.velocities.value("w").tolist() == [4.0, 4.0]
    with pytest.raises(RequestError, match="momentum must be at least 0 and below 1"):
        MomentumCorrection({}, momentum=1.0)

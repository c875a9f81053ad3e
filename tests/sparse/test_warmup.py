"""Densities step by step, learning rates beside them, clipping, corrected momentum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave._src.errors import RequestError
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.warmup import (
    Densities,
    MomentumCorrection,
    clip_local_norm,
    local_norm_limit,
)


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


def test_a_warmup_needs_to_know_what_an_epoch_is():
    with pytest.raises(RequestError, match="how many steps an epoch has: density=Densities"):
        Densities()


@pytest.mark.parametrize("make", [GTopK, TopK])
def test_a_density_has_to_be_given(make):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'density'"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clipping_before_selection(dtype):
    gradient = torch.tensor([3.0, 4.0], dtype=dtype)
    clip_local_norm(gradient, {"a": 1, "b": 1}, limit=5.0)
    assert gradient.tolist() == [3.0, 4.0]
    clip_local_norm(gradient, {"a": 1, "b": 1}, limit=2.5)
    assert gradient.tolist() == [1.5, 2.0]
    nothing = torch.zeros(3, dtype=dtype)
    clip_local_norm(nothing, {"a": 3}, limit=1.0)
    assert nothing.tolist() == [0, 0, 0]
    clip_local_norm(nothing[:0], {}, limit=1.0)
    for limit in (0.0, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="clip_norm must be positive and finite, got"):
            clip_local_norm(gradient, {"a": 2}, limit=limit)


def test_clipping_does_not_hide_what_is_not_finite():
    for bad in (torch.nan, torch.inf):
        gradient = torch.tensor([1.0, bad])
        clip_local_norm(gradient, {"a": 2}, limit=1.0)
        assert not torch.isfinite(gradient).all()


@given(st.permutations(range(5)), st.integers(0, 2**32))
def test_the_order_in_a_bucket_changes_no_bit_of_what_is_clipped(order, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = {str(size): torch.randn(size, generator=generator) for size in (1, 7, 30, 64, 101)}

    def clipped(names):
        flat = torch.cat([parts[name] for name in names])
        elements = {name: parts[name].numel() for name in names}
        clip_local_norm(flat, elements, limit=0.1)
        return dict(zip(names, flat.split(list(elements.values())), strict=True))

    names = list(parts)
    expected, found = clipped(names), clipped([names[place] for place in order])
    assert all(torch.equal(expected[name], found[name]) for name in names)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 9))
def test_limits_of_buckets_add_up_to_that_of_the_model(sizes, ranks):
    """So a mean of gradients that are at right angles to each other keeps to it."""
    limits = [local_norm_limit(3.0, ranks=ranks, share=size / sum(sizes)) for size in sizes]
    assert sum(limit**2 for limit in limits) / ranks == pytest.approx(9.0)


def velocities(correction, gradients, masked=()):
    """One bucket, step by step; some elements are applied in each step."""
    for gradient in gradients:
        velocity = correction.begin(["w"], torch.tensor(gradient))
        correction.applied(velocity, torch.tensor(masked, dtype=torch.int32))
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

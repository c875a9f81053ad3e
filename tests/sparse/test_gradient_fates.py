"""What becomes of gradients, in one process: whoever zeroes them, and whoever takes steps."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gradweave._src.sparse.gradient_fates import Fate, GradientFates


def in_place(model):
    nn.Module.zero_grad(model, set_to_none=False)


def to_none(model):
    nn.Module.zero_grad(model, set_to_none=True)


def by_optimizer_in_place(model):
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)


def by_optimizer_to_none(model):
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=True)


def one_by_one(model):
    for parameter in model.parameters():
        parameter.grad.zero_()


def replaced(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def by_sgd(model):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def by_fused_adam(model):
    torch.optim.AdamW(model.parameters(), lr=1.0, fused=True).step()


def as_in_the_tutorial(model):
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad.data)


def without_grad(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)


ZEROING = [in_place, to_none, by_optimizer_in_place, by_optimizer_to_none, one_by_one, replaced]
STEPPING = [by_sgd, by_fused_adam, as_in_the_tutorial, without_grad]


class Watched:
    """A model, of whose three gradients one is zero, like many of which nothing was selected."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1))
        nn.init.zeros_(self.model[0].weight)
        self.fates = GradientFates(dict(self.model.named_parameters()))
        self.is_synced = True
        self._found = None
        self.model[0].weight.register_post_accumulate_grad_hook(self._last_gradient)

    def _last_gradient(self, parameter):
        del parameter
        if self.is_synced:
            self._found = self.fates.begin()

    def passes(self):
        """Backward; what had become of the pass before, which is asked when gradients are here."""
        self._found = None
        self.model(torch.ones(1, 3)).sum().backward()
        return self._found


def all_are(fate, fates):
    return set(fates.values()) == {fate}


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("is_held", [False, True])
def test_what_is_zeroed_before_a_step_is_discarded(zero, is_held):
    """Also in the first step, when nobody knows yet who takes the steps."""
    watched = Watched()
    if is_held:
        watched.passes()
        by_sgd(watched.model)
        zero(watched.model)
    for _ in range(2):
        watched.passes()
        zero(watched.model)
        assert all_are(Fate.DISCARDED, watched.fates.now())
        assert all_are(Fate.DISCARDED, watched.passes())
        zero(watched.model)


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("step", STEPPING)
def test_what_a_step_was_taken_with_is_applied(zero, step):
    watched = Watched()
    for _ in range(2):
        watched.passes()
        step(watched.model)
        zero(watched.model)
        assert all_are(Fate.APPLIED, watched.fates.now())
    assert all_are(Fate.APPLIED, watched.passes())


@pytest.mark.parametrize("step", STEPPING)
def test_what_is_not_zeroed_waits_for_a_step(step):
    watched = Watched()
    watched.passes()
    assert all_are(Fate.WAITING, watched.fates.now())
    assert all_are(Fate.WAITING, watched.passes())
    nn.utils.clip_grad_norm_(watched.model[0].parameters(), 0.1)
    assert all_are(Fate.WAITING, watched.fates.now())
    step(watched.model)
    assert all_are(Fate.APPLIED, watched.passes())


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("is_before", [False, True])
def test_passes_that_are_not_synchronised_between(zero, is_before):
    """The gradients of a pass may be zeroed before such a pass, or with its own after it."""
    watched = Watched()
    watched.passes()
    watched.is_synced = False
    if is_before:
        zero(watched.model)
    watched.passes()
    if not is_before:
        assert all_are(Fate.WAITING, watched.fates.now())
        zero(watched.model)
    watched.is_synced = True
    assert all_are(Fate.DISCARDED, watched.passes())


@pytest.mark.parametrize("zero", [in_place, to_none])
def test_each_optimizer_has_its_own_parameters(zero):
    watched = Watched()
    first, second = watched.model
    for _ in range(2):
        watched.passes()
        by_sgd(first)
        zero(watched.model)
        assert watched.fates.now() == {
            "0.weight": Fate.APPLIED,
            "1.weight": Fate.DISCARDED,
            "1.bias": Fate.DISCARDED,
        }
    watched.passes()
    zero(second)
    assert watched.passes() == {
        "0.weight": Fate.WAITING,
        "1.weight": Fate.DISCARDED,
        "1.bias": Fate.DISCARDED,
    }


def test_a_step_without_gradients_changes_nothing():
    watched = Watched()
    watched.passes()
    by_sgd(watched.model)
    watched.passes()
    to_none(watched.model)
    by_sgd(watched.model)
    assert all_are(Fate.DISCARDED, watched.passes())


def test_a_pass_that_fails_is_over():
    watched = Watched()
    watched.passes()

    def fail(parameter):
        raise ValueError("in the middle")

    hook = watched.model[1].bias.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        watched.passes()
    hook.remove()
    to_none(watched.model)
    assert all_are(Fate.DISCARDED, watched.passes())


def test_gradients_of_inputs_alone_are_no_pass():
    watched = Watched()
    watched.passes()
    inputs = torch.ones(1, 3, requires_grad=True)
    torch.autograd.grad(watched.model(inputs).sum(), inputs)
    assert all_are(Fate.WAITING, watched.fates.now())
    by_sgd(watched.model)
    assert all_are(Fate.APPLIED, watched.passes())


def test_nothing_is_left_on_parameters_afterwards():
    model = nn.Linear(2, 1)
    fates = GradientFates(dict(model.named_parameters()))
    is_gone = weakref.ref(fates)
    del fates
    gc.collect()
    assert is_gone() is None
    assert not model.weight._backward_hooks

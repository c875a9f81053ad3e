"""Whether backward passes are noticed, whatever a model returns."""

import pytest
import torch

from gradweave.runtime.passes import Backward


def watched(outputs):
    backward = Backward()
    backward.has_begun = False
    backward.watch(outputs, where="rank 0, step 1")
    return backward


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_any_output_is_a_backward_pass(used):
    weight = torch.ones(3, requires_grad=True)
    outputs = {"probs": weight.softmax(0), "logits": 2 * weight}
    backward = watched(outputs)
    assert not backward.has_begun
    list(outputs.values())[used].sum().backward()
    assert backward.has_begun


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("fails", [True, False])
def test_a_pass_that_fails_is_logged_once(caplog, fails):
    weight = torch.ones(3, requires_grad=True)
    value = Failing.apply(weight) if fails else weight
    outputs = (2 * value, 3 * value)
    watched(outputs)
    loss = sum(output.sum() for output in outputs)
    if fails:
        with pytest.raises(ArithmeticError, match="on purpose"):
            loss.backward()
    else:
        loss.backward()
    assert caplog.text.count("rank 0, step 1: the backward pass failed") == fails


def test_outputs_without_a_gradient_count_as_a_step():
    assert watched((torch.ones(1), None)).has_begun

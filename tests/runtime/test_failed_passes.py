"""A backward pass that fails is logged with its rank and step, once; others are not."""

import logging

import pytest
import torch
from small_training import on_two
from torch import nn

from gradweave.runtime.ddp import DistributedDataParallel


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, fails):
        ctx.fails = fails
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("on purpose")
        return gradient, None


class Model(nn.Module):
    """Which fails in backward between its two layers, where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, value, *, fails=False):
        return self.last(Failing.apply(self.first(value), fails))


def logged(group, options):
    found = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage().partition(";")[0])
    logging.getLogger("gradweave").addHandler(handler)
    wrapped = DistributedDataParallel(Model(), **options)
    for _ in range(2):
        with wrapped.no_sync():
            wrapped(torch.ones(1, 2)).sum().backward()
        wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ArithmeticError, match="on purpose"):
        wrapped(torch.ones(1, 2), fails=True).sum().backward()
    return found


def test_a_pass_that_fails_is_logged_once(tmp_path):
    found = on_two(logged, {}, scratch=tmp_path)
    assert found == [[f"rank {rank}, step 3: the backward pass failed"] for rank in range(2)]


def test_a_hook_of_ours_says_more_by_itself(tmp_path):
    assert on_two(logged, {"wire_dtype": torch.bfloat16}, scratch=tmp_path) == [[], []]

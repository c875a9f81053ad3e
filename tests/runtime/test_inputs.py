"""Tensors in inputs of every shape."""

import pytest
import torch

from gradweave._src.runtime.wrapping.inputs import MOST_VALUES, batch_size, tensors_in


def in_itself(*first):
    value = list(first)
    value.append(value)
    return value


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ((torch.ones(3, 2),), 3),
        (({"a": torch.tensor(1.0), "b": [torch.ones(4)]}, torch.ones(5)), 4),
        ((in_itself(), torch.ones(3)), 3),
        ((in_itself(),), 1),
        ((nested(torch.ones(3), 5000),), 3),
        (([0] * MOST_VALUES, torch.ones(3)), 1),
        (("text",), 1),
    ],
)
def test_the_batch_size(inputs, size):
    assert batch_size(inputs) == size


def test_tensors_come_in_order():
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    found = list(tensors_in(([first, {"x": (second,)}], third)))
    assert [tensor.shape[0] for tensor in found] == [1, 2, 3]

"""Tensors in what goes into forward passes and comes out of them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

# How many values are looked at: millions of numbers in lists hide no tensors.
MOST_VALUES = 100_000


def batch_size(inputs: tuple[Any, ...]) -> int:
    """Return the batch size of the first tensor that has one; 1 where none is found."""
    sizes = (tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim() > 0)
    return max(1, next(sizes, 1))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in order; of what is too large or in itself, the first ones."""
    waiting, seen = [value], dict[int, Any]()  # which keeps them: an id is not used again
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and (parts := _parts(value)) is not None:
            seen[id(value)] = value
            waiting += reversed(parts)


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return None

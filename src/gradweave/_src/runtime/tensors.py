"""Tensors in what goes into forward passes and comes out of them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def batch_size(inputs: tuple[Any, ...]) -> int:
    """Return the batch size of the first tensor that has one."""
    sizes = (tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim() > 0)
    return max(1, next(sizes, 1))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])

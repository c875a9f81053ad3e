"""What goes into forward passes and comes out of them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class Backward:
    """Whether a synchronised backward pass has begun since the last step began."""

    def __init__(self) -> None:
        self.has_begun = True  # before the first step

    def watch(self, output: Any) -> None:
        """Where the output has no tensor to watch, its forward counts as a step."""
        found = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
        if found is None:
            self.has_begun = True
        else:
            found.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: torch.Tensor) -> None:
        del gradient
        self.has_begun = True


def batch_size(inputs: tuple[Any, ...]) -> int:
    """Of the first tensor that has one."""
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
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])

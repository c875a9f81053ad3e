"""What goes into forward passes and comes out of them, and whether backward passes end."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from gradweave.torch_internals import when_backward_ends

logger = logging.getLogger(__name__)


class Backward:
    """Whether a synchronised backward pass has begun since the last step began."""

    def __init__(self) -> None:
        self.has_begun = True  # before the first step

    def watch(self, output: Any, *, where: str | None = None) -> None:
        """Where the output has no tensor to watch, its forward counts as a step.

        With ``where`` a pass that fails is logged with it: which rank and step this is.
        """
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if watched:  # a loss may use any of them
            register_multi_grad_hook(watched, partial(self._begin, where), mode="any")
        else:
            self.has_begun = True

    def _begin(self, where: str | None, gradient: torch.Tensor) -> None:
        del gradient
        self.has_begun = True
        if where is not None:
            when_backward_ends(_Unended(where))


class _Unended:
    """A backward pass under way. torch drops it with the pass, whether that ends well or not.

    So the log can say where a pass failed, though the error is raised in code that is not ours.
    """

    def __init__(self, where: str) -> None:
        self._where, self._has_ended = where, False

    def __call__(self) -> None:
        """At the end of the pass; torch's wrapper then waits for its messages, which may fail."""
        when_backward_ends(self._end)

    def _end(self) -> None:
        self._has_ended = True

    def __del__(self) -> None:
        if not self._has_ended:
            logger.error(
                "%s: the backward pass failed; if a peer is gone or stalls, timeline=True also "
                "names the bucket",
                self._where,
            )


def after_torch(callback: Callable[[], None]) -> None:
    """When the backward pass under way is over, and torch's wrapper has written all gradients."""
    # torch queues its own when the last bucket has been sent.
    when_backward_ends(partial(when_backward_ends, callback))


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

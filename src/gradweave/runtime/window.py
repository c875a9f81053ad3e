"""When the ranks compute: between the beginning of forward and the last gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import torch
from torch import nn


class ComputeWindow:
    """Open while this rank computes, so that another thread can measure beside it."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._open = Event()
        self._missing = 0
        self.has_ended = False

    def open(self) -> None:
        """Forward begins."""
        self._missing = len(self._parameters)
        self._open.set()

    def close(self) -> None:
        if not self.has_ended:
            self._open.clear()

    def end(self) -> None:
        """For good: nobody is to measure any more."""
        self.has_ended = True
        self._open.set()

    def wait(self) -> None:
        """Until it is open, or has ended."""
        self._open.wait()

    @contextmanager
    def watching(self, on_last: Callable[[], None]) -> Iterator[None]:
        """With hooks that see the last gradient come, for the length of a block."""
        self._on_last = on_last
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            for parameter in self._parameters.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gradient(self, parameter: torch.Tensor) -> None:
        del parameter
        self._missing -= 1
        if self._missing == 0:
            self.close()
            self._on_last()

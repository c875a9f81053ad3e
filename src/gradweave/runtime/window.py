"""When the ranks compute: between the beginning of forward and the last gradient."""

from collections.abc import Iterator
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

    def open(self) -> None:
        """Forward begins."""
        self._missing = len(self._parameters)
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Begins when the window is open; may outlast it."""
        self._open.wait()
        yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """With hooks that see the last gradient come, for the length of a block."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            for parameter in self._parameters.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.set()  # whoever still waits may go on

    def _gradient(self, parameter: torch.Tensor) -> None:
        del parameter
        self._missing -= 1
        if self._missing <= 0:
            self.close()

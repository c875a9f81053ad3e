"""Compute that runs beside what is measured, as training does."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch

# One product takes a millisecond or two on a core: as long as an operation of a real model, and
# short enough to stop soon.
MATRIX_SIZE = 320


class Load:
    """A thread that multiplies matrices while it is told to."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
        self._wanted, self._idle, self._over = Event(), Event(), Event()
        self._thread = Thread(target=self._work, name="gradweave load", daemon=True)
        self._thread.start()

    @contextmanager
    def running(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001
        """For the length of a block, if ``wanted``."""
        if not wanted:
            yield
            return
        self._idle.clear()
        self._wanted.set()
        try:
            yield
        finally:
            self._wanted.clear()
            self._idle.wait()

    def close(self) -> None:
        self._over.set()
        self._wanted.set()
        self._thread.join()

    def _work(self) -> None:
        product = torch.empty_like(self._matrix)
        while True:
            self._wanted.wait()
            if self._over.is_set():
                return
            while self._wanted.is_set():
                torch.mm(self._matrix, self._matrix, out=product)
                if product.device.type != "cpu":
                    torch.accelerator.synchronize()
            self._idle.set()


@contextmanager
def computing(device: torch.device) -> Iterator[Load]:
    load = Load(device)
    try:
        yield load
    finally:
        load.close()

"""Compute that runs beside what is measured, as training does."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch

# One product takes a millisecond or two on a core: as long as an operation of a real model, and
# short enough to stop soon.
MATRIX_SIZE = 320


@contextmanager
def computing(device: torch.device) -> Iterator[Thread]:
    """A thread multiplies matrices for the length of a block."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
    over = Event()

    def work() -> None:
        product = torch.empty_like(matrix)
        while not over.is_set():
            torch.mm(matrix, matrix, out=product)
            if device.type != "cpu":
                torch.accelerator.synchronize()

    thread = Thread(target=work, name="gradweave load", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()

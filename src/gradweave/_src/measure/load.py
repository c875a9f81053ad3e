"""Compute that runs beside what is measured, as training does."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch

from gradweave._src.clocks import clock_for
from gradweave._src.device_order import own_stream

# One product takes a millisecond or two on a core: as long as an operation of a real model, and
# short enough to stop soon.
MATRIX_SIZE = 320
PRODUCTS_AHEAD = 2


@contextmanager
def computing(device: torch.device) -> Iterator[Thread]:
    """Have a thread multiply matrices for the length of a block."""
    over, begun = Event(), Event()
    clock = clock_for(device)

    def work() -> None:
        with own_stream(device):
            matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
            product = torch.empty_like(matrix)
            ahead: deque[object] = deque()
            while not over.is_set():
                torch.mm(matrix, matrix, out=product)
                # An accelerator has a few products ahead, and no more, for it has to stop soon.
                ahead.append(clock.mark())
                if len(ahead) > PRODUCTS_AHEAD:
                    clock.wait_until(ahead.popleft())
                    begun.set()
            while ahead:
                clock.wait_until(ahead.popleft())

    thread = Thread(target=work, name="gradweave load", daemon=True)
    thread.start()
    while not begun.wait(0.1) and thread.is_alive():
        pass  # measuring begins when it computes
    try:
        yield thread
    finally:
        over.set()
        thread.join()

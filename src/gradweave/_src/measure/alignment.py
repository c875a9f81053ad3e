"""Clocks of different ranks, made comparable."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradweave._src.comm.small_messages import FIRST_TAG, for_texts
from gradweave._src.torch_internals import HOST

ROUND_TRIPS = 8


def clock_offset_s(
    group: dist.ProcessGroup, *, now_s: Callable[[], float] = time.perf_counter
) -> float:
    """Return what to add to this rank's clock to read rank 0's. Call it on every rank.

    Rank 0 answers each rank with its time; the answer of the fastest round trip is taken to have
    been given in the middle of it.
    """
    group = for_texts(group)  # on other groups the host does not wait for a message
    if group.rank() != 0:
        best = min(_asked(group, now_s) for _ in range(ROUND_TRIPS))
        return best[1]
    for rank in range(1, group.size()):
        for _ in range(ROUND_TRIPS):
            message = torch.zeros(1, dtype=torch.float64, device=HOST)
            group.recv([message], rank, FIRST_TAG).wait()
            message.fill_(now_s())
            group.send([message], rank, FIRST_TAG).wait()
    return 0.0


def _asked(group: dist.ProcessGroup, now_s: Callable[[], float]) -> tuple[float, float]:
    """Return how long a round trip to rank 0 took, and the offset that it tells."""
    message = torch.zeros(1, dtype=torch.float64, device=HOST)
    sent_s = now_s()
    group.send([message], 0, FIRST_TAG).wait()
    group.recv([message], 0, FIRST_TAG).wait()
    back_s = now_s()
    return back_s - sent_s, float(message.item()) - (sent_s + back_s) / 2

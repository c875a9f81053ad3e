"""Timing collectives on a group, in the manner of nccl-tests: checked, interleaved, medians.

What each number means is in docs/measuring.md.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from gradweave._src.clocks import clock_for, taken_s
from gradweave._src.collectives.schedule import block_edges
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.small_messages import for_texts, largest, payload_device
from gradweave._src.measure.timings import Timing
from gradweave._src.vocabulary import Operation

# A burst of calls is timed as one, so that clocks and wake-ups do not count for small messages.
LEAST_BURST_S = 0.02
MOST_CALLS = 100


def time_collectives(
    communicator: Communicator,
    *,
    operation: Operation,
    algorithms: Sequence[str],
    nbytes: int,
    repeats: int,
) -> Iterator[Timing]:
    """Time all algorithms in turn on the same message; the results are the same on every rank."""
    device = payload_device(communicator.group)
    message = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    correct = {name: _is_correct(communicator, operation, name, message) for name in algorithms}
    calls = {name: _calls_per_burst(communicator, operation, name, message) for name in algorithms}
    times_s: dict[str, list[float]] = {name: [] for name in algorithms}
    for _, name in product(range(repeats), algorithms):
        burst_s = _burst_s(communicator, operation, name, message, calls[name])
        times_s[name].append(burst_s / calls[name])
    for name in algorithms:  # checked again, after many calls in a row
        correct[name] &= _is_correct(communicator, operation, name, message)
    ranks = communicator.group.size()
    for name in algorithms:
        median_s = float(np.median(times_s[name]))
        yield Timing(
            op=operation,
            algorithm=name,
            ranks=ranks,
            bytes=nbytes,
            median_s=median_s,
            p10_s=float(np.quantile(times_s[name], 0.1)),
            p90_s=float(np.quantile(times_s[name], 0.9)),
            repeats=repeats,
            algbw_bytes_per_s=nbytes / median_s,
            busbw_bytes_per_s=nbytes / median_s * bus_factor(operation, ranks),
            correct=correct[name],
        )


def bus_factor(operation: Operation, ranks: int) -> float:
    """Return how often the message must cross the busiest link, whatever the algorithm."""
    match operation:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "reduce-scatter" | "all-gather":
            return (ranks - 1) / ranks
        case "broadcast" | "reduce":
            return 1.0


def _burst_s(
    communicator: Communicator, operation: Operation, name: str, message: torch.Tensor, calls: int
) -> float:
    for_texts(communicator.group).barrier().wait()

    def burst() -> None:
        for _ in range(calls):
            communicator.run(operation, message, collective=name)

    return _slowest(communicator, taken_s(clock_for(message.device), burst))


def _calls_per_burst(
    communicator: Communicator, operation: Operation, name: str, message: torch.Tensor
) -> int:
    once_s = _burst_s(communicator, operation, name, message, 1)
    return max(1, min(MOST_CALLS, round(LEAST_BURST_S / once_s)))


def _slowest(communicator: Communicator, seconds: float) -> float:
    """Return the largest of what ranks measured, so that all continue with the same number."""
    (slowest,) = largest(communicator.group, [seconds])
    return slowest


def _is_correct(
    communicator: Communicator, operation: Operation, name: str, message: torch.Tensor
) -> bool:
    """Return whether small integers, whose sums are exact, come out exactly; leave zeros behind."""
    ranks, rank = communicator.group.size(), communicator.group.rank()
    counting = torch.arange(message.numel(), dtype=torch.float32) % 7
    message.copy_(counting + rank)
    communicator.run(operation, message, collective=name)
    sent, message = message, message.cpu()
    total = counting * ranks + ranks * (ranks - 1) // 2
    edges = block_edges(message.numel(), ranks).tolist()
    own = slice(edges[rank], edges[rank + 1])
    match operation:
        case "all-reduce":
            right = torch.equal(message, total)
        case "broadcast":
            right = torch.equal(message, counting)
        case "reduce":
            right = rank != 0 or torch.equal(message, total)
        case "reduce-scatter":
            right = torch.equal(message[own], total[own])
        case "all-gather":
            owners = torch.repeat_interleave(torch.arange(ranks), torch.tensor(edges).diff())
            right = torch.equal(message, counting + owners)
    sent.zero_()
    return _slowest(communicator, float(not right)) == 0.0

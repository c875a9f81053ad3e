"""Two ways to read the time: the host's clock, and events on an accelerator's streams.

A host that hands work to an accelerator runs ahead of it: what it reads from its own clock is when
something was asked for, not when it happened. So whoever measures sets marks, which are moments of
the host where that computes and events on the current stream where an accelerator does, and asks
for what lies between them when they have passed, steps later. Nobody waits for a mark in a step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from gradweave._src.device_order import is_capturing


class Clock(Protocol):
    """Marks moments cheaply; what lies between them is asked for later."""

    def mark(self) -> object: ...

    def has_passed(self, mark: object) -> bool:
        """Return whether the mark can be asked for; never waits."""
        ...

    def seconds(self, since: object, until: object) -> float:
        """Return the seconds between two marks that have passed."""
        ...

    def wait_until(self, mark: object) -> None:
        """Let the host wait until a mark has passed, for measurements beside or after training."""
        ...

    def on_host_s(self, mark: object) -> float:
        """Return the moment by the host's own clock; waits for what was asked for so far."""
        ...


class HostClock:
    """A clock for what runs on the host; ``now_s`` may be a scripted clock."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s

    def mark(self) -> object:
        return self._now_s()

    def has_passed(self, mark: object) -> bool:
        del mark
        return True

    def seconds(self, since: object, until: object) -> float:
        assert isinstance(since, float)
        assert isinstance(until, float)
        return until - since

    def wait_until(self, mark: object) -> None:
        """Return at once: a mark of the host has passed when it was made."""

    def on_host_s(self, mark: object) -> float:
        assert isinstance(mark, float)
        return mark


class _Mark:
    """An event that goes back to where it came from when nobody knows the mark any more."""

    __slots__ = ("_pool", "event")

    def __init__(self, event: torch.Event, pool: deque[torch.Event]) -> None:
        self.event, self._pool = event, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


# While a graph is captured, events would become a part of it: such a moment never comes.
_NEVER = object()


class DeviceClock:
    """A clock whose marks are events on the current stream of an accelerator.

    Making events takes longer than recording them, so those of marks that are gone are used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[torch.Event] = deque()

    def mark(self) -> object:
        if is_capturing(self._device):
            return _NEVER
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return _Mark(event, self._free)

    def has_passed(self, mark: object) -> bool:
        return isinstance(mark, _Mark) and bool(mark.event.query())

    def seconds(self, since: object, until: object) -> float:
        assert isinstance(since, _Mark)
        assert isinstance(until, _Mark)
        return float(since.event.elapsed_time(until.event)) / 1e3

    def wait_until(self, mark: object) -> None:
        assert isinstance(mark, _Mark)
        mark.event.synchronize()

    def on_host_s(self, mark: object) -> float:
        now = self.mark()
        self.wait_until(now)
        now_s = time.perf_counter()
        return now_s - self.seconds(mark, now)


def clock_for(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def have_passed(clock: Clock, marks: Iterable[object]) -> bool:
    return all(map(clock.has_passed, marks))


def taken_s(clock: Clock, run: Callable[[], object]) -> float:
    """Return how long a call and what it asks an accelerator for take; the host waits for both.

    It is for measurements beside or after a training, on a stream of its own: only that is waited
    for.
    """
    began = clock.mark()
    run()
    ended = clock.mark()
    clock.wait_until(ended)
    return clock.seconds(began, ended)

"""Two ways to read the time: the host's clock, and events on an accelerator's stream."""

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Clock(Protocol):
    """Marks moments cheaply; what lies between them is asked for later."""

    def mark(self) -> object: ...

    def seconds(self, since: object, until: object) -> float: ...

    def has_passed(self, mark: object) -> bool:
        """Whether asking for what lies before it would wait for nothing."""
        ...


class HostClock:
    """For what runs on the host; ``now_s`` may be a scripted clock."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s

    def mark(self) -> object:
        return self._now_s()

    def seconds(self, since: object, until: object) -> float:
        assert isinstance(since, float)
        assert isinstance(until, float)
        return until - since

    def has_passed(self, mark: object) -> bool:
        del mark
        return True


class DeviceClock:
    """For what an accelerator runs later than asked for. (Not run here: no accelerator.)"""

    def mark(self) -> object:
        event = torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True)
        event.record()
        return event

    def seconds(self, since: object, until: object) -> float:
        assert isinstance(since, torch.Event)
        assert isinstance(until, torch.Event)
        until.synchronize()
        return since.elapsed_time(until) / 1e3

    def has_passed(self, mark: object) -> bool:
        assert isinstance(mark, torch.Event)
        return bool(mark.query())


def clock_for(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock()

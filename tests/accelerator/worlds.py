"""Run one function on every rank of a small world in which rank r has the device ``sim:r``."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import commands
import ranks
import torch
import torch.distributed as dist

BACKEND = "cpu:gloo,sim:simccl"

# Loaded before ranks are forked; a process starts its streams only when it uses them.
commands.ALSO_PRELOADED.append("accelerator.sim")


def on_devices(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    scratch: Path,
    delay_s: float = 2e-4,
    seed: int = 0,
    timeout: timedelta = timedelta(seconds=20),
) -> list[Any]:
    """What ``fn(group, *args)`` returns on each rank, which must leave no hazard behind.

    The default group has gloo for the CPU and simccl for the device. ``fn`` may change the delays
    and call ``sim.reset``; a function that provokes hazards resets before it returns.
    """
    return ranks.on_processes(
        world,
        partial(_checked, fn),
        *args,
        scratch=scratch,
        timeout=timeout,
        backend=BACKEND,
        prepare=partial(_prepare, delay_s, seed),
    )


def _prepare(delay_s: float, seed: int, rank: int) -> None:
    from accelerator import sim  # noqa: PLC0415 builds the device where it was not built yet

    sim.set_device(rank)
    sim.set_delays(delay_s, seed=seed * 1000 + rank)


def _checked(fn: Callable[..., Any], group: dist.ProcessGroup, *args: Any) -> Any:
    from accelerator import sim  # noqa: PLC0415

    value = fn(group, *args)
    torch.accelerator.synchronize()
    assert sim.hazards() == []
    assert sim.errors() == []
    return value

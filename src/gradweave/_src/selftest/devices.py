"""Devices by name: whether there are enough of them, and what messages between them go by."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from gradweave._src.errors import RequestError

CPU = "cpu"
FEWEST_RANKS = 2


def import_first(modules: Sequence[str]) -> None:
    """Import what makes a device known to torch, such as a backend that is not a part of it."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise RequestError(f"--import {name}: {error}; is it installed?") from None


def ranks_for(kind: str, asked: int | None) -> int:
    """Return how many ranks there are to be: one for each device, or as many as were asked for."""
    there_are = devices_of(kind)
    if asked is None:
        asked = FEWEST_RANKS if there_are is None else there_are
    if asked < FEWEST_RANKS:
        raise RequestError(
            f"a self-test needs {FEWEST_RANKS} ranks, and there is {asked} {kind} device; try "
            "--device cpu, or a machine with more"
            if there_are is not None
            else f"a self-test needs {FEWEST_RANKS} ranks or more, got {asked}"
        )
    if there_are is not None and asked > there_are:
        raise RequestError(
            f"{asked} ranks need a device each, and torch finds {there_are} of kind {kind}; give "
            f"--ranks {there_are} or less"
        )
    return asked


def devices_of(kind: str) -> int | None:
    """Return how many devices of this kind torch finds; None: as many as one likes."""
    if kind == CPU:
        return None
    found = torch.accelerator.current_accelerator()
    known = CPU if found is None else f"{CPU} and {found.type}"
    if found is None or found.type != kind:
        raise RequestError(
            f"no device {kind!r}: torch {torch.__version__} finds {known} here; a backend of its "
            "own may need --import"
        )
    return torch.accelerator.device_count()


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one."""
    if kind == CPU:
        return torch.device(CPU)
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def backend_of(kind: str) -> str:
    """Return what torch itself would take for this kind of device."""
    try:
        return str(dist.get_default_backend_for_device(kind))
    except ValueError:
        raise RequestError(
            f"no process groups for {kind} devices: no backend has said that it is for them"
        ) from None


def device_name(device: torch.device) -> str:
    """Return what the device's maker calls it, where torch says so."""
    if device.type == CPU:
        return CPU
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if ask is None else str(ask(device))

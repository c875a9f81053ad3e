"""Keeping a training as the folder of a run: all ranks tell, rank 0 writes, all hear of it."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from gradweave._src.comm.small_messages import broadcast_text, gather_long_text
from gradweave._src.errors import GradweaveError, RequestError
from gradweave._src.runs import RunFolder
from gradweave._src.runtime.reporting.step_clock import StepClock
from gradweave._src.session.saved_run import RankNotes, StepLosses, Training, losses_of, run_of
from gradweave._src.trace import Tensor

Folder = str | os.PathLike[str]
Note = TypeVar("Note")


class _Said(Struct, frozen=True, kw_only=True):
    """One rank's note, or why it has none."""

    note: Any = None
    problem: str | None = None


def gather_notes(
    group: dist.ProcessGroup, take: Callable[[], Note], kind: type[Note]
) -> tuple[Note, ...]:
    """Return what every rank notes. Where one of them fails, all raise the same RequestError."""
    try:
        said = _Said(note=msgspec.to_builtins(take()))
    except Exception as error:  # noqa: BLE001 others wait
        said = _Said(problem=_in_one_line(error))
    text = msgspec.json.encode(said).decode()
    everyone = [msgspec.json.decode(one, type=_Said) for one in gather_long_text(group, text)]
    for rank, one in enumerate(everyone):
        if one.problem is not None:
            raise RequestError(f"the run was not saved: rank {rank}: {one.problem}")
    return tuple(msgspec.convert(one.note, kind) for one in everyone)


def rank_notes(clock: StepClock, *, notes_timelines: bool) -> RankNotes:
    return RankNotes(
        host=gethostname(), phases=tuple(clock.phases()), notes_timelines=notes_timelines
    )


def write_on_rank_0(
    group: dist.ProcessGroup,
    folder: Folder,
    losses: StepLosses | None,
    make: Callable[[], Training],
) -> None:
    """Put together and write a run on rank 0. Where that fails, all raise the same RequestError."""
    problem, cause = "", None  # a cause only where nobody expected it
    if group.rank() == 0:
        try:
            training = make()
            run = run_of(training)
            RunFolder(folder).write(run, losses_of(losses, training))
        except Exception as error:  # noqa: BLE001 others wait
            problem = _in_one_line(error)
            cause = None if isinstance(error, GradweaveError | OSError) else error
    problem = broadcast_text(group, problem)
    if problem:
        raise RequestError(f"the run was not saved: {problem}") from cause


def tensors_of(parameters: Mapping[str, torch.Tensor]) -> tuple[Tensor, ...]:
    """Return tensors as a trace has them, without times, in the order of declaration."""
    return tuple(
        Tensor(
            name=name,
            elements=parameter.numel(),
            bytes_per_element=parameter.element_size(),
            ready_s=0.0,
            forward_s=0.0,
            shape=tuple(parameter.shape),
        )
        for name, parameter in parameters.items()
        if parameter.numel()
    )


def script_name() -> str:
    """Return the name of the program, without arguments, which may be private."""
    return Path(sys.argv[0]).name or "python"


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: " if error.filename else ""
        return f"{what}{error.strerror}"
    text = " ".join(str(error).split())
    return text if isinstance(error, GradweaveError) and text else f"{type(error).__name__}: {text}"

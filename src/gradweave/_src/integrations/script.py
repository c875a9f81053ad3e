"""Running a script that knows nothing of us with our wrapper in place of torch's."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

import torch.distributed as dist
from msgspec import Struct

from gradweave._src.comm.letting_go import let_threads_go
from gradweave._src.errors import RequestError
from gradweave._src.integrations.stand_in import in_torchs_place, stand_in
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.reporting.account import PlanningAccount
from gradweave._src.vocabulary import printable

# What launchers tell each of the processes that they start: torchrun, srun, mpirun.
RANKS_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# The multiprocessing package's name for the module that Python was started with.
MAIN_OF_SPAWNED = "__mp_main__"


class Script(Struct, frozen=True, kw_only=True):
    """What is to be run: a file, or the module of that name."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


class _Made(Struct, frozen=True, kw_only=True):
    """A model that was wrapped, and who tells of it."""

    model: str
    account: PlanningAccount
    speaks: bool


def run_script(script: Script, options: Mapping[str, Any], *, to: TextIO) -> int:
    """Run it as Python would, and write what its wrappers have found at its end, on rank 0.

    ``options`` are for each wrapper. Return 1 where an exception ended it, whose traceback is
    printed as Python prints it; what the script exits with is passed on. A process that was
    started alone keeps torch's class.
    """
    if not script.is_module and not Path(script.name).exists():
        raise RequestError(f"there is no file {script.name}")
    rank = next((os.environ[name] for name in RANKS_NAMES if name in os.environ), None)
    made: list[_Made] = []

    def note(wrapper: DistributedDataParallel) -> None:
        model = type(wrapper.module).__name__
        made.append(_Made(model=model, account=wrapper.account(), speaks=dist.get_rank() == 0))

    if rank is None:  # processes that the script starts would have torch's class, so all have it
        with suppress(BrokenPipeError):
            print(_alone(script), file=to, flush=True)
    ours = nullcontext() if rank is None else in_torchs_place(stand_in(options, note))
    try:
        with ours, _as_main(script) as run:
            run()
    except Exception as error:  # noqa: BLE001 it is the script's, and shown as such
        with suppress(BrokenPipeError):
            _show(error, script)
        return 1
    finally:
        with suppress(BrokenPipeError):  # nobody reads it; the script's exit code stays
            for line in _report(made, rank):
                print(line, file=to, flush=True)
    return 0


class _WhateverIsMain(ModuleType):
    """A stand-in for the script's module under the name that it has in processes it spawns.

    What they send back is looked for there, and Python has put our own module there.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


@contextmanager
def _as_main(script: Script) -> Iterator[Callable[[], object]]:
    """Let the script find what it would find if Python had been given it."""
    argv, first, ours = sys.argv, sys.path[0], sys.modules.get(MAIN_OF_SPAWNED)
    folder = None if sys.flags.safe_path else _folder(script)  # Python puts none there then
    sys.modules[MAIN_OF_SPAWNED] = _WhateverIsMain(MAIN_OF_SPAWNED)
    sys.argv = [script.name, *script.arguments]
    if folder is not None:
        sys.path[0] = str(folder)

    def run() -> object:
        try:
            if script.is_module:
                return runpy.run_module(script.name, run_name="__main__", alter_sys=True)
            return runpy.run_path(script.name, run_name="__main__")
        finally:
            let_threads_go()  # before its names go, and its wrappers and groups with them

    try:
        yield run
    finally:
        sys.argv = argv
        if folder is not None:
            sys.path[0] = first
        del sys.modules[MAIN_OF_SPAWNED]
        if ours is not None:
            sys.modules[MAIN_OF_SPAWNED] = ours


def _folder(script: Script) -> Path | None:
    """Return where Python looks first for what the script imports; None where runpy knows."""
    if script.is_module:
        return Path.cwd()
    return Path(script.name).resolve().parent if Path(script.name).is_file() else None


def _alone(script: Script) -> str:
    named = f"-m {script.name}" if script.is_module else script.name
    return (
        "gradweave: this process was not started by torchrun, so torch's own class is used; start "
        f"it with torchrun … -m gradweave run {printable(named)}"
    )


def _report(made: Sequence[_Made], rank: str | None) -> Iterator[str]:
    if not made and rank == "0":
        yield "gradweave: no model was wrapped in this process by torch's DistributedDataParallel"
    for number, one in enumerate(made, 1):
        if one.speaks:
            of = f", model {number} of {len(made)}" if len(made) > 1 else ""
            yield f"gradweave{of} ({one.model}):\n{one.account.explain()}"


def _show(error: Exception, script: Script) -> None:
    """Show an error as Python does, from the script's own lines on."""
    traceback = _from_script(error.__traceback__, script)
    error = error.with_traceback(traceback)  # Python's hook shows the error's own
    # What looks at the end for what has ended a script finds it.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error, traceback)


def _from_script(traceback: TracebackType | None, script: Script) -> TracebackType | None:
    at = traceback
    while at is not None:
        is_main = at.tb_frame.f_globals.get("__name__") == "__main__"
        if is_main and at.tb_frame.f_code.co_name == "<module>" and _is_of(at, script):
            return at
        at = at.tb_next
    return traceback


def _is_of(traceback: TracebackType, script: Script) -> bool:
    return script.is_module or traceback.tb_frame.f_code.co_filename == script.name

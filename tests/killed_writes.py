"""Writes something again and again, each time in a process that is killed at the next system call.

``python killed_writes.py CASE FOLDER MOST`` prints, as JSON, what was found afterwards and how
often. A process that is traced stops before and after every call that it makes, whatever library
makes it. It is killed MOST times at most, all over the writing.
"""

import ctypes
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import python

TRACE_ME, GO_TO_NEXT_CALL, SET_OPTIONS = 0, 24, 0x4200
DIES_WITH_US = 0x100000
FORBIDDEN = 77  # exit code: this machine lets nobody trace
EVERY_CALL = 10_000  # more than any case has
MOST_S = 800.0


class Case(NamedTuple):
    """How one of two is written, "old" or "new", and which of them is there."""

    write: Callable[[str], object]
    look: Callable[[], str]


def after_kills(case: str, folder: Path, *, most: int) -> dict[str, Any]:
    """What ``main`` prints: stops, what was found how often, unfinished files, what was last."""
    done = python(__file__, case, folder, most, most_s=MOST_S)
    if done.returncode == FORBIDDEN:
        pytest.skip("this machine lets nobody trace a process")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def ptrace(request: int, process: int, data: int = 0) -> int:
    call = ctypes.CDLL(None).ptrace
    call.argtypes, call.restype = [ctypes.c_long] * 4, ctypes.c_long
    return int(call(request, process, 0, data))


def stops_of(write: Callable[[], object], *, killed_at: int | None = None) -> int:
    """How often it stops until it has written, or is killed, in a process of its own."""
    process = os.fork()
    if process == 0:
        if ptrace(TRACE_ME, 0) != 0:
            os._exit(FORBIDDEN)
        os.kill(os.getpid(), signal.SIGSTOP)
        write()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
    ptrace(SET_OPTIONS, process, DIES_WITH_US)
    stops = 0
    while stops != killed_at:
        ptrace(GO_TO_NEXT_CALL, process)
        _, status = os.waitpid(process, 0)
        if not os.WIFSTOPPED(status):
            assert status == 0, "writing failed by itself"
            return stops
        stops += 1
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return stops


def a_trace(folder: Path) -> Case:
    from gradweave import Trace, load_trace  # noqa: PLC0415 each case has its own
    from gradweave._src import files  # noqa: PLC0415 each case has its own

    values = {"old": load_trace("alexnet"), "new": load_trace("alexnet").with_bytes_per_element(2)}
    path = folder / "trace.json"
    return Case(
        lambda which: files.write(path, values[which]),
        lambda: _which(values, files.read(path, Trace)),
    )


def a_state(folder: Path) -> Case:
    import torch  # noqa: PLC0415

    from gradweave._src.sparse import checkpoint  # noqa: PLC0415

    torch.set_num_threads(1)  # others would not be there in a process that was forked

    def state(step: int) -> dict[str, object]:
        # More than fits into a buffer, so that the file is written in several calls.
        values = {"weight": torch.full((40_000,), float(step))}
        return {
            "schema": "gradweave.sparse/2",
            "rank": 0,
            "ranks": 1,
            "step": step,
            "shapes": {"weight": [40_000]},
            "residuals": {"scale": 1.0, "values": values},
        }

    def look() -> str:
        found = checkpoint.load(folder, rank=0, ranks=1)
        weight = found["residuals"]["values"]["weight"]
        assert (weight == found["step"]).all()
        return _which({"old": 1, "new": 2}, found["step"])

    steps = {"old": 1, "new": 2}
    return Case(lambda which: checkpoint.save(state(steps[which]), folder), look)


def a_run(folder: Path) -> Case:
    from msgspec.structs import replace  # noqa: PLC0415

    from gradweave import FormatError, load_network, load_trace, make_plan, simulate  # noqa: PLC0415
    from gradweave._src import files  # noqa: PLC0415
    from gradweave._src.results import Results  # noqa: PLC0415
    from gradweave._src.runs import Run, RunFolder  # noqa: PLC0415

    golden = Path(__file__).parent / "golden"
    results = files.read(golden / "results-2.json", Results)
    row = replace(results.rows[0], runtime="mine")
    trace, network = load_trace("alexnet"), load_network("k80-10gbe")
    plan = make_plan(trace, network, workers=4)
    timeline = simulate(trace, plan, network, workers=4)

    def run(command: str) -> Run:
        return Run(
            trace=trace,
            network=network,
            results=replace(results, command=command, rows=(row,)),
            plans={"mine": plan},
            predicted={"mine": timeline},
            measured={"mine": (timeline,)},
        )

    runs = {which: run(which) for which in ("old", "new")}

    def look() -> str:
        try:
            return _which(runs, RunFolder(folder).read())
        except FormatError as error:
            return "none" if "has no results.json" in str(error) else "torn"

    return Case(lambda which: RunFolder(folder).write(runs[which]), look)


def a_training(folder: Path) -> Case:
    """In one folder, again and again; as rank 0 of one, for a forked process has no group."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    from gradweave import TrainingState  # noqa: PLC0415
    from gradweave._src.checkpoint.written_beside import WrittenBeside  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = {"old": 1.0, "new": 2.0}

    def fill(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def write(which: str) -> None:
        fill(values[which])
        dcp.save({"training": state}, storage_writer=WrittenBeside(folder), no_dist=True)

    def look() -> str:
        fill(-1.0)
        dcp.load({"training": state}, checkpoint_id=folder, no_dist=True)
        found = {float(one) for p in model.parameters() for one in p.flatten()}
        return _which({which: {value} for which, value in values.items()}, found)

    return Case(write, look)


CASES = {"trace": a_trace, "state": a_state, "run": a_run, "training": a_training}


def _which(values: dict[str, object], found: object) -> str:
    return next((which for which, value in values.items() if value == found), "torn")


def main(name: str, folder: Path, most: int) -> None:
    case = CASES[name](folder)
    case.write("old")
    stops = stops_of(lambda: case.write("new"))
    every = -(-stops // most)
    found: Counter[str] = Counter()
    left = 0  # unfinished files, at most, after the next one has been written
    for stop in range(1, stops + 1, every):
        case.write("old")
        left = max(left, len([*folder.glob(".*.partial")]))
        stops_of(lambda: case.write("new"), killed_at=stop)
        found[case.look()] += 1
    case.write("new")
    left = max(left, len([*folder.glob(".*.partial")]))
    print(json.dumps({"stops": stops, "found": found, "left": left, "last": case.look()}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

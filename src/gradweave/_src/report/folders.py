"""The folders a report is made of: runs that ended."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from gradweave._src import files
from gradweave._src.errors import FormatError, RequestError
from gradweave._src.results import Losses
from gradweave._src.runs import Run, RunFolder
from gradweave._src.timeline import Timeline

SENT = "communication"


class Folder(Struct, frozen=True, kw_only=True):
    """One run, and the loss curves that lie beside it."""

    name: str
    run: Run
    losses: Losses | None

    @property
    def workers(self) -> int:
        return self.run.results.rows[0].workers


def read_folders(paths: Sequence[str | os.PathLike[str]]) -> list[Folder]:
    """Read all runs; each path is one, of a training or a benchmark, or a folder of runs."""
    return [_read(path) for given in paths for path in _runs_in(Path(given))]


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RequestError(f"no folder {str(path)!r}; name the folder of a run")
    if _is_run(path):
        return [path]
    # Benchmarks keep several runs in a folder of theirs.
    found = [run for one in _folders_in(path) for run in ([one] if _is_run(one) else _runs_of(one))]
    return found or [path]


def _folders_in(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))


def _runs_of(path: Path) -> list[Path]:
    return [one for one in _folders_in(path) if _is_run(one)]


def _is_run(path: Path) -> bool:
    return (path / "results.json").is_file() and not path.name.startswith(".")


def _read(path: Path) -> Folder:
    run = RunFolder(path).read()
    if not run.results.rows:
        raise FormatError(f"{path / 'results.json'}: rows: empty; there is nothing to report")
    _check_rows(path, run)
    _check_tensors(path, run)
    losses = path / "losses.json"
    return Folder(
        name=path.resolve().name,
        run=run,
        losses=files.read(losses, Losses) if losses.is_file() else None,
    )


def _check_rows(path: Path, run: Run) -> None:
    names = [row.runtime for row in run.results.rows]
    for row in run.results.rows:
        name, problem = row.runtime, None
        if name not in run.measured and run.steps is None:
            raise FormatError(f"{path}: runtime {name!r} has no measured timeline; run it again")
        timelines = _timelines(run, name)
        if names.count(name) > 1:
            problem = "stands twice"
        elif not (row.iteration_s and all(one.iteration_s for one in timelines)):
            problem = "has an iteration without length"
        elif not all(s.tensors for one in timelines for s in one.spans if s.lane == SENT):
            problem = "has a message without tensors"
        elif run.steps is not None and run.steps.workers != row.workers:
            problem = f"has {row.workers} workers, and steps.json {run.steps.workers}"
        if problem is not None:
            raise FormatError(f"{path}: runtime {name!r} {problem}; run it again")


def _timelines(run: Run, runtime: str) -> list[Timeline]:
    """Return all timelines that there are of a runtime."""
    predicted = run.predicted.get(runtime)
    return [*run.measured.get(runtime, ()), *([] if predicted is None else [predicted])]


def _check_tensors(path: Path, run: Run) -> None:
    known = {tensor.name for tensor in run.trace.tensors}
    for row in run.results.rows:
        name = row.runtime
        used: Iterable[tuple[str, ...]] = (
            *(bucket.tensors for bucket in run.plans[name].buckets),
            *(span.tensors for one in _timelines(run, name) for span in one.spans),
        )
        for tensor in (tensor for tensors in used for tensor in tensors):
            if tensor not in known:
                raise FormatError(
                    f"{path}: {name!r} sends {tensor!r}, which trace {run.trace.name!r} has not"
                )

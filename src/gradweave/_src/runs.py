"""The folder an experiment leaves behind: what was asked, predicted and measured, as JSON files.

    RUN/trace.json network.json results.json
    RUN/RUNTIME/plan.json predicted.json measured.json measured-1.json …

Timelines were measured on every rank: rank 0's is measured.json, rank 1's measured-1.json, all
counted from the same moment.

A benchmark writes predictions before anything is measured. A training is written when it is over,
or as far as it has come, with steps.json, findings.json and perhaps losses.json beside the rest; it
may know no network, and then nothing is predicted, and have noted no timeline. `gradweave report`
reads such folders.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct

from gradweave._src import files
from gradweave._src.errors import FormatError, RequestError
from gradweave._src.network import Network
from gradweave._src.partials import partial_folder
from gradweave._src.plan import Plan
from gradweave._src.results import Losses, Results
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.training_record import Account, Steps
from gradweave._src.vocabulary import file_name

RESULTS = "results.json"  # last of all: where it is, the run has ended
MEASURED = re.compile(r"measured(-[1-9][0-9]*)?\.json")
# What not every run has.
OPTIONAL = ("steps.json", "findings.json", "network.json", "losses.json")
KINDS: Mapping[str, type[Any]] = {
    "trace.json": Trace,
    "network.json": Network,
    RESULTS: Results,
    "steps.json": Steps,
    "findings.json": Account,
    "losses.json": Losses,
}


class Prediction(Struct, frozen=True, kw_only=True):
    """What is written down before a runtime runs."""

    runtime: str
    plan: Plan
    timeline: Timeline


class Run(Struct, frozen=True, kw_only=True):
    """One trace on one network under several runtimes, or one training."""

    trace: Trace
    network: Network | None  # None: a training whose messages nobody has timed
    results: Results
    plans: dict[str, Plan]
    predicted: dict[str, Timeline]  # of a training only where there is a network
    measured: dict[str, tuple[Timeline, ...]]  # by rank, where messages were watched
    steps: Steps | None = None  # of a training
    account: Account | None = None  # of a training


class RunFolder:
    """Writes a run as it comes about, and reads it back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, trace: Trace, network: Network, runtimes: Sequence[str]) -> None:
        """Begin a run under these runtimes, in the place of one that was there."""
        self.require_room(runtimes)
        self.path.mkdir(parents=True, exist_ok=True)
        self._forget(runtimes)
        files.write(self.path / "trace.json", trace)
        files.write(self.path / "network.json", network)

    def predict(self, prediction: Prediction) -> None:
        """Write what a runtime is expected to do."""
        folder = self._of(prediction.runtime)
        folder.mkdir(exist_ok=True)
        files.write(folder / "plan.json", prediction.plan)
        files.write(folder / "predicted.json", prediction.timeline)

    def finish(self, results: Results, measured: Mapping[str, Sequence[Timeline]]) -> None:
        """Write results, and timelines by runtime and rank."""
        for runtime, timelines in measured.items():
            folder = self._of(runtime)
            folder.mkdir(exist_ok=True)
            for rank, timeline in enumerate(timelines):
                files.write(_measured(folder, rank), timeline)
        files.write(self.path / RESULTS, results)

    def write(self, run: Run, losses: Losses | None = None) -> None:
        """Put all of it in the place of a run that was there, or nothing where that fails.

        Whoever is stopped in between leaves no results.json, and so no run.
        """
        self.require_room([row.runtime for row in run.results.rows])
        self.path.mkdir(parents=True, exist_ok=True)
        with partial_folder(self.path) as scratch:
            _write_parts(scratch, run, losses)
            self._forget([row.runtime for row in run.results.rows])
            written = sorted(scratch.rglob("*.json"), key=lambda path: path.name == RESULTS)
            for path in written:
                target = self.path / path.relative_to(scratch)
                target.parent.mkdir(exist_ok=True)
                path.replace(target)

    def require_room(self, runtimes: Sequence[str]) -> None:
        """Refuse to replace or remove what is of no run, though it has the name of a part."""
        if self.path.is_file():
            raise RequestError(f"{self.path} is a file, not a folder; give a new folder")
        kinds = {self.path / name: kind for name, kind in KINDS.items()}
        for folder in map(self._of, runtimes):
            if folder.exists() and not folder.is_dir():
                raise RequestError(f"{folder} is in the way and no folder; give a new folder")
            kinds[folder / "plan.json"] = Plan
            timelines = (folder / "predicted.json", *_any_measured(folder))
            kinds |= dict.fromkeys(timelines, Timeline)
        for path, kind in kinds.items():
            if path.exists() and not _is_part(path, kind):
                raise RequestError(
                    f"{path} is in the way and of no run; give a new folder, or one that a run was "
                    "kept in"
                )

    def _forget(self, runtimes: Sequence[str]) -> None:
        """Remove what a new run may not replace of an older one; first that it has ended."""
        older = [self.path / name for name in (RESULTS, *OPTIONAL)]
        for folder in map(self._of, runtimes):
            older += [folder / "plan.json", folder / "predicted.json", *_any_measured(folder)]
        for path in older:
            path.unlink(missing_ok=True)

    def read(self) -> Run:
        if not (self.path / RESULTS).is_file():
            raise FormatError(f"{self.path} has no results.json; name a folder of a run that ended")
        results = files.read(self.path / RESULTS, Results)
        runtimes = [row.runtime for row in results.rows]
        steps, account = self.path / "steps.json", self.path / "findings.json"
        is_training = steps.is_file()
        network = self.path / "network.json"
        predicted = {name: self._of(name) / "predicted.json" for name in runtimes}
        return Run(
            trace=files.read(self.path / "trace.json", Trace),
            network=None if is_training and not network.is_file() else files.read(network, Network),
            results=results,
            plans={name: files.read(self._of(name) / "plan.json", Plan) for name in runtimes},
            predicted={
                name: files.read(path, Timeline)
                for name, path in predicted.items()
                if path.is_file() or not is_training
            },
            measured={
                name: tuple(files.read(path, Timeline) for path in paths)
                for name in runtimes
                if (paths := _all_measured(self._of(name)))
            },
            steps=files.read(steps, Steps) if is_training else None,
            account=files.read(account, Account) if account.is_file() else None,
        )

    def _of(self, runtime: str) -> Path:
        return self.path / file_name(runtime)


def _write_parts(path: Path, run: Run, losses: Losses | None) -> None:
    parts = {
        "trace.json": run.trace,
        "network.json": run.network,
        "steps.json": run.steps,
        "findings.json": run.account,
        "losses.json": losses,
        RESULTS: run.results,
    }
    for name, part in parts.items():
        if part is not None:
            files.write(path / name, part)
    for runtime, plan in run.plans.items():
        folder = path / file_name(runtime)
        folder.mkdir()
        files.write(folder / "plan.json", plan)
        if runtime in run.predicted:
            files.write(folder / "predicted.json", run.predicted[runtime])
        for rank, timeline in enumerate(run.measured.get(runtime, ())):
            files.write(_measured(folder, rank), timeline)


def _is_part(path: Path, kind: type[Any]) -> bool:
    """Return whether the file is a part of some run, whole as all of them are."""
    try:
        return files.holds(path, kind)
    except (OSError, FormatError):
        return False


def _measured(folder: Path, rank: int) -> Path:
    return folder / (f"measured-{rank}.json" if rank else "measured.json")


def _all_measured(folder: Path) -> list[Path]:
    return list(takewhile(Path.exists, (_measured(folder, rank) for rank in count())))


def _any_measured(folder: Path) -> list[Path]:
    """Return timelines of any ranks; whoever was stopped may have left only some of them."""
    return [path for path in folder.glob("measured*.json") if MEASURED.fullmatch(path.name)]

"""The folder an experiment leaves behind: what was asked, predicted and measured, as JSON files.

    RUN/trace.json network.json results.json
    RUN/RUNTIME/plan.json predicted.json measured.json measured-1.json …

Timelines were measured on every rank: rank 0's is measured.json, rank 1's measured-1.json, all
counted from the same moment.

Predictions are written before anything is measured. `gradweave report` reads such folders.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path

from msgspec import Struct

from gradweave import files
from gradweave.errors import FormatError
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.results import Results
from gradweave.timeline import Timeline
from gradweave.trace import Trace


class Prediction(Struct, frozen=True, kw_only=True):
    """What is written down before a runtime runs."""

    runtime: str
    plan: Plan
    timeline: Timeline


class Run(Struct, frozen=True, kw_only=True):
    """One trace on one network under several runtimes."""

    trace: Trace
    network: Network
    results: Results
    plans: dict[str, Plan]
    predicted: dict[str, Timeline]
    measured: dict[str, tuple[Timeline, ...]]  # by rank, where messages were watched


class RunFolder:
    """Writes a run as it comes about, and reads it back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, trace: Trace, network: Network) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        files.write(self.path / "trace.json", trace)
        files.write(self.path / "network.json", network)

    def predict(self, prediction: Prediction) -> None:
        folder = self._of(prediction.runtime)
        folder.mkdir(exist_ok=True)
        files.write(folder / "plan.json", prediction.plan)
        files.write(folder / "predicted.json", prediction.timeline)

    def finish(self, results: Results, measured: Mapping[str, Sequence[Timeline]]) -> None:
        """Timelines by runtime and rank."""
        for runtime, timelines in measured.items():
            folder = self._of(runtime)
            folder.mkdir(exist_ok=True)
            for rank, timeline in enumerate(timelines):
                files.write(_measured(folder, rank), timeline)
        files.write(self.path / "results.json", results)

    def read(self) -> Run:
        if not (self.path / "results.json").is_file():
            raise FormatError(f"{self.path} has no results.json; name a folder of a run that ended")
        results = files.read(self.path / "results.json", Results)
        runtimes = [row.runtime for row in results.rows]
        return Run(
            trace=files.read(self.path / "trace.json", Trace),
            network=files.read(self.path / "network.json", Network),
            results=results,
            plans={name: files.read(self._of(name) / "plan.json", Plan) for name in runtimes},
            predicted={
                name: files.read(self._of(name) / "predicted.json", Timeline) for name in runtimes
            },
            measured={
                name: tuple(files.read(path, Timeline) for path in paths)
                for name in runtimes
                if (paths := list(_all_measured(self._of(name))))
            },
        )

    def _of(self, runtime: str) -> Path:
        """A runtime's name may carry an argument behind a colon, which not every disk can store."""
        return self.path / runtime.replace(":", "-").replace("/", "-")


def _measured(folder: Path, rank: int) -> Path:
    return folder / (f"measured-{rank}.json" if rank else "measured.json")


def _all_measured(folder: Path) -> Iterator[Path]:
    return takewhile(Path.exists, (_measured(folder, rank) for rank in count()))

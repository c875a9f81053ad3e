"""What becomes of ranks when something goes wrong on one of them: case by wrapper by stage.

``python tests/faults/matrix.py`` runs all of them on an emulated cluster, prints each as a row, and
writes the table of docs/reliability.md; it fails where a row is not as promised there.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from gradweave.errors import LabError
from gradweave.lab import Cluster, ClusterSpec, OutputLine

RANK_PROGRAM = Path(__file__).with_name("faulty_rank.py")
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
RANKS, FAULTY_RANK = 3, 1
FIRST_PORT = 29600
# Of the group, as in faulty_rank.py; and how much later than that everything must be over.
TIMEOUT_S, MARGIN_S = 5.0, 15.0
# Until ranks have imported torch, on a busy machine, and until a stage is reached.
LIMIT_S = 180.0
TORCHS = "torchinductor"

CASES = (
    "killed",
    "stopped",
    "link cut",
    "exception in forward",
    "exception in backward",
    "exception before the optimizer's step",
)
WRAPPERS = ("dense", "gtopk", "sharded")
STAGES = ("recording", "learning", "trying", "settled")
WHERE = re.compile(r"\brank (\d+), step (\d+)\b")
BEGIN, END = "<!-- made by tests/faults/matrix.py -->", "<!-- until here -->"


class Row(Struct, frozen=True, kw_only=True):
    """How one case ended."""

    case: str
    wrapper: str
    stage: str
    ended_s: float | None  # after the fault, until the last rank that had to end; None: never
    exit_codes: dict[int, int]  # by rank, of those that ended by themselves
    where: dict[int, list[str]]  # by rank, what it said of rank and step
    left: list[str]  # temporary files

    @property
    def problem(self) -> str | None:
        """What is not as promised."""
        if self.ended_s is None:
            return f"after {TIMEOUT_S + MARGIN_S:g} s ranks still ran"
        for rank in survivors():
            if self.exit_codes.get(rank) == 0:
                return f"rank {rank} ended as if nothing had happened"
            if not self.where.get(rank):
                return f"rank {rank} did not say where it was"
        return f"left behind: {self.left}" if self.left else None


def survivors() -> list[int]:
    return [rank for rank in range(RANKS) if rank != FAULTY_RANK]


def must_end(case: str) -> set[int]:
    """Who ends by itself: a process that was stopped cannot."""
    return set(survivors()) if case == "stopped" else set(range(RANKS))


class Faults:
    """A cluster whose ranks go wrong as often as they are asked to."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        self._lines: SimpleQueue[OutputLine] = SimpleQueue()
        self._asked = 0
        self._job = cluster.start(
            [sys.executable, str(RANK_PROGRAM), str(folder)],
            on_line=self._lines.put,
            env={"TMPDIR": str(self._scratch)},
        )

    def run(self, case: str, wrapper: str, stage: str) -> Row:
        number = self._ask({"case": case, "wrapper": wrapper, "stage": stage})
        fault_s, ended_s = None, {}
        exit_codes: dict[int, int] = {}
        where: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
        deadline_s = time.monotonic() + LIMIT_S
        while not exit_codes.keys() >= must_end(case) and time.monotonic() < deadline_s:
            try:
                line = self._lines.get(timeout=0.1)
            except Empty:
                self._require_running()
                continue
            told = json.loads(line.text) if line.text.startswith("{") else {}
            if "fault" in told:
                fault_s = told["at_s"]
                if case == "link cut":
                    self._cluster.cut(FAULTY_RANK)
                    fault_s = time.monotonic()
                deadline_s = fault_s + TIMEOUT_S + MARGIN_S
            if told.get("ended") == number:
                exit_codes[line.rank], ended_s[line.rank] = told["exit_code"], told["at_s"]
            if WHERE.search(line.text):
                where[line.rank].append(line.text)
        assert fault_s is not None, f"{wrapper} never came to {stage}"
        is_over = exit_codes.keys() >= must_end(case)
        left = [path.name for path in self._left()]
        self._tidy(number, case, set(exit_codes))
        return Row(
            case=case,
            wrapper=wrapper,
            stage=stage,
            ended_s=max(ended_s.values()) - fault_s if is_over else None,
            exit_codes=exit_codes,
            where=where,
            left=left,
        )

    def _require_running(self) -> None:
        """The processes that fork ranks; what they said last tells why they do not."""
        with suppress(LabError):  # as it should be
            raise AssertionError(self._job.wait(0.0))

    def end(self) -> None:
        (self._folder / f"{self._asked}.json").write_text("null")
        self._job.wait(LIMIT_S)

    def _ask(self, question: dict[str, str]) -> int:
        number, self._asked = self._asked, self._asked + 1
        asked = {**question, "port": FIRST_PORT + number}
        partial = self._folder / "question.partial"
        partial.write_text(json.dumps(asked))
        partial.rename(self._folder / f"{number}.json")
        return number

    def _tidy(self, number: int, case: str, ended: set[int]) -> None:
        """Let the next case find the cluster as this one found it."""
        if case == "link cut":
            self._cluster.heal(FAULTY_RANK)
        (self._folder / f"{number}.kill").touch()
        deadline_s = time.monotonic() + LIMIT_S
        while ended < set(range(RANKS)):
            assert time.monotonic() < deadline_s
            line = self._lines.get(timeout=LIMIT_S)
            if line.text.startswith("{") and json.loads(line.text).get("ended") == number:
                ended.add(line.rank)
        for path in self._left():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _left(self) -> list[Path]:
        """Temporary files, but for what torch keeps for its compiler."""
        return [path for path in self._scratch.iterdir() if not path.name.startswith(TORCHS)]


@contextmanager
def faults() -> Iterator[Faults]:
    with (
        TemporaryDirectory(prefix="faults-") as folder,
        Cluster(ClusterSpec(nodes=RANKS, rate="1gbit")) as cluster,
    ):
        made = Faults(cluster, Path(folder))
        yield made
        made.end()


def table(rows: list[Row]) -> str:
    """For people: after how many seconds all had ended."""
    found = {(row.case, row.wrapper, row.stage): row for row in rows}
    lines = [f"| what goes wrong | wrapper | {' | '.join(STAGES)} |", "|---|---|" + "---|" * 4]
    for case, wrapper in product(CASES, WRAPPERS):
        cells = [_cell(found.get((case, wrapper, stage))) for stage in STAGES]
        lines.append(f"| {case} | {wrapper} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    return f"{row.ended_s:.1f} s" if row.problem is None else f"**{row.problem}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--wrapper", choices=WRAPPERS, action="append")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--output", type=Path, help="a file for the rows, as JSON")
    parser.add_argument("--page", action="store_true", help="write the table of the page")
    options = parser.parse_args()
    rows = []
    with faults() as found:
        for asked in product(
            options.case or CASES, options.wrapper or WRAPPERS, options.stage or STAGES
        ):
            rows.append(found.run(*asked))
            print(msgspec.json.encode(rows[-1]).decode(), flush=True)  # noqa: T201
    if options.output is not None:
        options.output.write_bytes(msgspec.json.encode(rows))
    if options.page:
        before, rest = PAGE.read_text().split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    problems = [f"{row.case}, {row.wrapper}, {row.stage}: {row.problem}" for row in rows]
    problems = [text for row, text in zip(rows, problems, strict=True) if row.problem]
    for text in problems:
        print(text, file=sys.stderr)  # noqa: T201
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What becomes of ranks when something goes wrong on one of them: case by wrapper by stage.

``python tests/faults/matrix.py`` runs each case with each wrapper in one of the stages, on an
emulated cluster; ``--all`` in all of them. Each is printed as a row, and what is not as
docs/reliability.md promises fails. ``--keep`` keeps them in ``ROWS``, beside those of earlier runs,
and writes the table of that page from what is there.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from textwrap import fill

import msgspec
from msgspec import Struct

from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec, OutputLine

RANK_PROGRAM = Path(__file__).with_name("faulty_rank.py")
REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "reliability.md"
ROWS = REPOSITORY / "benchmarks" / "results" / "faults_2cores_20261118.jsonl"
RANKS, FAULTY_RANK = 3, 1
FIRST_PORT = 29600
RATE, A_TENTH = "1gbit", "100mbit"
# How long a link is cut that is healed: long enough for several of TCP's attempts.
CUT_FOR_S = 1.0
# Of the group, as in faulty_rank.py; and how much later than that everything must be over.
TIMEOUT_S, MARGIN_S = 5.0, 15.0
# Until ranks have imported torch, on a busy machine, and until a stage is reached.
LIMIT_S = 180.0
TORCHS = "torchinductor"

CASES = (
    "killed",
    "stopped",
    "link cut",
    "link cut for a second",
    "link at a tenth of its rate",
    "exception in forward",
    "exception in backward",
    "exception in a hook",
    "exception in the optimizer",
    "ends early",
    "disk full",
    "disk full at a checkpoint",
    "launcher killed",
)
WRAPPERS = ("dense", "gtopk", "sharded")
STAGES = ("recording", "learning", "trying", "settled")
# Training goes on as if nothing had happened, or, where that is safe.
GOES_ON = {"link cut for a second", "link at a tenth of its rate", "disk full"}
MAY_GO_ON = {"launcher killed"}
# Who says something, and what, where it is not where a survivor was in training.
SAID = {
    "disk full": ({0}, re.compile("not written: ")),
    "disk full at a checkpoint": (set(range(RANKS)), re.compile("File too large")),
    "link cut for a second": (set(), None),
    "link at a tenth of its rate": (set(), None),
}
WHERE = re.compile(r"\brank \d+, step \d+\b")
MOST_CHARACTERS = 160
PAGE_COLUMNS = 100
BEGIN, END = "<!-- made by tests/faults/matrix.py -->", "<!-- until here -->"


class Asked(Struct, frozen=True):
    """One cell of the table."""

    case: str
    wrapper: str
    stage: str

    @property
    def applies(self) -> bool:
        """A plan is kept when it is settled on: later on nothing is written."""
        return not (self.case == "disk full" and self.stage == "settled")


class Row(Struct, frozen=True, kw_only=True):
    """How one case ended."""

    asked: Asked
    ended_s: float | None  # after the fault, until the last rank that had to end; None: never
    exit_codes: dict[int, int]  # by rank, of those that ended by themselves
    said: dict[int, list[str]]  # by rank, the sentences that the case is about
    weights: dict[int, str]  # by rank, a digest, where it has trained to the end
    left: list[str]  # processes, listening ports, files

    @property
    def went_on(self) -> bool:
        return set(self.exit_codes.values()) == {0}

    @property
    def problem(self) -> str | None:
        """What is not as promised."""
        case = self.asked.case
        if self.ended_s is None:
            return "ranks still ran at the end"
        if self.left:
            return f"left behind: {', '.join(self.left)}"
        if case in GOES_ON or (case in MAY_GO_ON and self.went_on):
            return self._problem_of_going_on()
        return self._problem_of_ending()

    def _problem_of_going_on(self) -> str | None:
        if not self.went_on:
            return f"exit codes {self.exit_codes}"
        if len(self.weights) < RANKS or len(set(self.weights.values())) > 1:
            return f"weights differ: {self.weights}"
        return self._problem_of_sentences()

    def _problem_of_ending(self) -> str | None:
        for rank in survivors():
            if self.exit_codes.get(rank) == 0:
                return f"rank {rank} ended as if nothing had happened"
        if self.asked.case == "ends early" and self.exit_codes[FAULTY_RANK]:
            return f"rank {FAULTY_RANK} ended with {self.exit_codes[FAULTY_RANK]}"
        return self._problem_of_sentences()

    def _problem_of_sentences(self) -> str | None:
        if self.asked.case in MAY_GO_ON and self.went_on:
            return None
        ranks, _ = SAID.get(self.asked.case, (survivors(), WHERE))
        for rank in sorted(ranks):
            if not self.said.get(rank):
                return f"rank {rank} did not say what happened"
            if len(self.said[rank]) > 1 and self.asked.case not in MAY_GO_ON:
                return f"rank {rank} said different things: {self.said[rank]}"
        return None


def survivors() -> set[int]:
    return set(range(RANKS)) - {FAULTY_RANK}


def must_end(case: str) -> set[int]:
    """Who ends by itself: a process that was stopped cannot."""
    return survivors() if case == "stopped" else set(range(RANKS))


def every_cell() -> list[Asked]:
    return [asked for cell in product(CASES, WRAPPERS, STAGES) if (asked := Asked(*cell)).applies]


def fair_subset() -> list[Asked]:
    """Each case with each wrapper once, and over all of them each wrapper in each stage."""
    chosen = []
    for number, case in enumerate(CASES):
        for other, wrapper in enumerate(WRAPPERS):
            first = number + other
            stages = [STAGES[(first + later) % len(STAGES)] for later in range(len(STAGES))]
            cells = (Asked(case, wrapper, stage) for stage in stages)
            chosen.append(next(cell for cell in cells if cell.applies))
    return chosen


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

    def run(self, asked: Asked) -> Row:
        case = asked.case
        _, sentence = SAID.get(case, (None, WHERE))
        number = self._ask(asked)
        fault_s, ended_s, left = None, {}, []
        exit_codes: dict[int, int] = {}
        weights: dict[int, str] = {}
        said: dict[int, dict[str, None]] = {rank: {} for rank in range(RANKS)}
        deadline_s = time.monotonic() + LIMIT_S
        while not exit_codes.keys() >= must_end(case) and time.monotonic() < deadline_s:
            try:
                line = self._lines.get(timeout=0.1)
            except Empty:
                self._require_running()
                continue
            told = json.loads(line.text) if line.text.startswith("{") else {}
            if "fault" in told:
                fault_s = self._begun(case, told["at_s"])
                if case not in GOES_ON | MAY_GO_ON:
                    deadline_s = fault_s + TIMEOUT_S + MARGIN_S
            if "weights" in told:
                weights[line.rank] = told["weights"]
            if told.get("ended") == number:
                exit_codes[line.rank], ended_s[line.rank] = told["exit_code"], told["at_s"]
                left += told["left"]
            if sentence is not None and (found := sentence.search(line.text)):
                said[line.rank][line.text[found.start() :][:MOST_CHARACTERS]] = None
        assert fault_s is not None, f"{asked} never came to its stage"
        is_over = exit_codes.keys() >= must_end(case)
        left += [path.name for path in self._left() if _counts(path, case)]
        self._tidy(number, case, set(exit_codes))
        return Row(
            asked=asked,
            ended_s=max(ended_s.values()) - fault_s if is_over else None,
            exit_codes=exit_codes,
            said={rank: list(sentences) for rank, sentences in said.items()},
            weights=weights,
            left=left,
        )

    def _begun(self, case: str, at_s: float) -> float:
        """When the fault began, which for links is when this has made it."""
        if case.startswith("link cut"):
            self._cluster.cut(FAULTY_RANK)
            at_s = time.monotonic()
        if case == "link cut for a second":
            time.sleep(CUT_FOR_S)
            self._cluster.heal(FAULTY_RANK)
        if case == "link at a tenth of its rate":
            self._cluster.set_rate(FAULTY_RANK, A_TENTH)
        return at_s

    def _require_running(self) -> None:
        """The processes that fork ranks; what they said last tells why they do not."""
        with suppress(LabError):  # as it should be
            raise AssertionError(self._job.wait(0.0))

    def end(self) -> None:
        (self._folder / f"{self._asked}.json").write_text("null")
        self._job.wait(LIMIT_S)

    def _ask(self, asked: Asked) -> int:
        number, self._asked = self._asked, self._asked + 1
        question = {**msgspec.to_builtins(asked), "port": FIRST_PORT + number}
        partial = self._folder / "question.partial"
        partial.write_text(json.dumps(question))
        partial.rename(self._folder / f"{number}.json")
        return number

    def _tidy(self, number: int, case: str, ended: set[int]) -> None:
        """Let the next case find the cluster as this one found it."""
        if case == "link cut":
            self._cluster.heal(FAULTY_RANK)
        if case == "link at a tenth of its rate":
            self._cluster.set_rate(FAULTY_RANK, RATE)
        (self._folder / f"{number}.kill").touch()
        deadline_s = time.monotonic() + LIMIT_S
        while ended < set(range(RANKS)):
            assert time.monotonic() < deadline_s
            line = self._lines.get(timeout=LIMIT_S)
            if line.text.startswith("{") and json.loads(line.text).get("ended") == number:
                ended.add(line.rank)
        for path in self._scratch.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _left(self) -> list[Path]:
        """Temporary files, but for what torch keeps for its compiler."""
        return [
            path
            for path in self._scratch.rglob("*")
            if path.is_file() and not path.relative_to(self._scratch).parts[0].startswith(TORCHS)
        ]


def _counts(path: Path, case: str) -> bool:
    """Of a checkpoint that could not be written, only what makes it look complete."""
    return case != "disk full at a checkpoint" or path.name == ".metadata"


@contextmanager
def faults() -> Iterator[Faults]:
    with (
        TemporaryDirectory(prefix="faults-") as folder,
        Cluster(ClusterSpec(nodes=RANKS, rate=RATE)) as cluster,
    ):
        made = Faults(cluster, Path(folder))
        yield made
        made.end()


def table(rows: Sequence[Row]) -> str:
    """For people: after how many seconds all had ended, or that they went on."""
    found = {row.asked: row for row in rows}
    lines = [f"| what goes wrong | wrapper | {' | '.join(STAGES)} |", "|---|---|" + "---|" * 4]
    for case, wrapper in product(CASES, WRAPPERS):
        cells = [Asked(case, wrapper, stage) for stage in STAGES]
        texts = [_cell(found.get(asked)) if asked.applies else "" for asked in cells]
        lines.append(f"| {case} | {wrapper} | {' | '.join(texts)} |")
    return "\n".join(lines)


def made_of(rows: Sequence[Row]) -> str:
    """What the page says of them."""
    return f"{table(rows)}\n\n{summary(rows)}"


def summary(rows: Sequence[Row]) -> str:
    """In a sentence."""
    bad = sum(row.problem is not None for row in rows)
    slowest_s = max((row.ended_s or 0.0 for row in rows if not row.went_on), default=0.0)
    return fill(
        f"{len(rows)} cases of {len(every_cell())} were run, of which {bad} did not end as "
        f"promised; {sum(row.went_on for row in rows)} went on, and the others had ended after "
        f"{slowest_s:.1f} s at most, with a time-out of {TIMEOUT_S:g} s.",
        PAGE_COLUMNS,
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row.problem is not None:
        return f"**{row.problem}**"
    return "goes on" if row.went_on else f"{row.ended_s:.1f} s"


def kept(path: Path) -> list[Row]:
    """The rows of a file, one in each line; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


def keep(path: Path, row: Row) -> None:
    """Write it in the place of an earlier one of the same case."""
    rows = {one.asked: one for one in kept(path)} | {row.asked: row}
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows.values()))


def write_page(rows: Sequence[Row]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made_of(rows)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="in every stage")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--wrapper", choices=WRAPPERS, action="append")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--keep", action="store_true", help="and write the page's table")
    parser.add_argument("--missing", action="store_true", help="only what is not kept")
    options = parser.parse_args()
    try:
        rows = list(_rows(options))
    except LabError as error:
        raise SystemExit(str(error)) from None
    problems = [f"{row.asked}: {row.problem}" for row in rows if row.problem]
    print("\n".join([f"{len(rows)} cases, {len(problems)} not as promised", *problems]))  # noqa: T201
    return 1 if problems else 0


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    with faults() as found:
        for asked in _asked(options):
            row = found.run(asked)
            print(msgspec.json.encode(row).decode(), flush=True)  # noqa: T201
            if options.keep:
                keep(ROWS, row)
                write_page(kept(ROWS))
            yield row


def _asked(options: argparse.Namespace) -> list[Asked]:
    asked = every_cell() if options.all or options.stage else fair_subset()
    known = {row.asked for row in kept(ROWS)} if options.missing else set()
    return [
        one
        for one in asked
        if one.case in (options.case or CASES)
        and one.wrapper in (options.wrapper or WRAPPERS)
        and one.stage in (options.stage or STAGES)
        and one not in known
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Tables for people, JSON for machines, progress and notes on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gradweave._src.advice import Advice
from gradweave._src.cli.narrow_tables import Column, Kind, Placed, drawn_width, fit
from gradweave._src.simulation import Outcome
from gradweave._src.vocabulary import printable

Item = TypeVar("Item")

# Where neither a terminal nor COLUMNS sets a width, a table is as wide as it needs to be.
UNLIMITED_WIDTH = 400
LEAST_WIDTH = 40

NAME_COLUMNS = frozenset(
    {
        "name",
        "passes",
        "planner",
        "first tensor",
        "last tensor",
        "operation",
        "algorithm",
        "tensor",
        "beside",
        "trace",
        "runtime",
        "phase",
        "way",
        "host",
        "interface",
        "address",
        "could also use",
        "from",
        "method",
        "check",
        "outcome",
    }
)
TEXT_COLUMNS = frozenset({"changes in results", "switched on by", "what it is"})


def print_line(text: str) -> None:
    """Print a line safely; names in it come from files, and may be anything."""
    print(printable(text))


def print_note(text: str) -> None:
    """Print a line beside the answer, on the other stream."""
    print(f"note: {printable(text)}", file=sys.stderr)


def print_json(rows: Any) -> None:
    """Print values as exact JSON, in characters that any terminal can write and none obeys."""
    text = msgspec.json.format(msgspec.json.encode(rows), indent=2).decode()
    print("\n".join(map(_in_ascii, text.split("\n"))))


def _in_ascii(line: str) -> str:
    if line.isascii() and line.isprintable():
        return line
    return "".join(
        one if one.isascii() and one.isprintable() else json.dumps(one)[1:-1] for one in line
    )


def print_table(title: str, columns: Mapping[str, Sequence[str]]) -> None:
    """Print a table as wide as there is space for, without cutting a number."""
    space = _space()
    shown = {printable(name): tuple(map(printable, cells)) for name, cells in columns.items()}
    fitted = fit([Column(name, cells, _kind(name)) for name, cells in shown.items()], space)
    print_line(title)
    if fitted.same:
        same = ", ".join(f"{name} {cell}" for name, cell in fitted.same.items())
        print_line(f"in all rows: {same}")
    for placed in fitted.tables:
        _draw(placed, space)


def _draw(placed: Sequence[Placed], space: int) -> None:
    table = Table()
    for column, width in placed:
        side: JustifyMethod = "right" if column.kind == "number" else "left"
        table.add_column(Text(column.name), justify=side, width=width, overflow="fold")
    for row in zip(*(one.cells for one in placed), strict=True):
        table.add_row(*(Text(cell) for cell in row))  # names are text, never markup
    # The terminal folds what does not fit even so, whereas rich would cut it.
    needed = drawn_width(one.width for one in placed)
    Console(width=max(space, needed)).print(table)


def _kind(column: str) -> Kind:
    if column in TEXT_COLUMNS:
        return "text"
    return "name" if column in NAME_COLUMNS else "number"


def _space() -> int:
    """Return the width of the terminal, or what the environment says."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(LEAST_WIDTH, Console().width)
    return UNLIMITED_WIDTH


def note_extrapolations(outcomes: Iterable[Outcome | Advice]) -> None:
    """Print one line on stderr for each curve that was asked beyond its last point."""
    for name, workers, limit in dict.fromkeys(
        (outcome.network, outcome.workers, outcome.extrapolated_from_bytes) for outcome in outcomes
    ):
        if limit is not None:
            print_note(
                f"{name} was measured up to {limit:,} bytes on {workers} workers; "
                "larger messages continue its last slope"
            )


def progress(items: Sequence[Item], *, doing: str) -> Iterator[Item]:
    """Yield items one by one, with a progress bar for work that may take seconds."""
    with progress_bar(len(items), doing=doing) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def progress_bar(total: int | None, *, doing: str) -> Iterator[Callable[[], None]]:
    """Give the block a function that moves a bar on; without a terminal it does nothing.

    Without a total it only shows that something happens.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    from rich.progress import Progress  # slow to import, and only people see it

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(escape(printable(doing)), total=total)
        yield lambda: bar.advance(task)


def percent(share: float | None) -> str:
    """Return a share in percent as text, which is empty where nobody knows."""
    return "" if share is None else f"{share:.1%}"

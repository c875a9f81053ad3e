"""Tables for people, JSON for machines, progress and notes on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradweave.advice import Advice
from gradweave.simulation import Outcome

Item = TypeVar("Item")

# Where no terminal sets a width, a table is as wide as it needs to be.
UNLIMITED_WIDTH = 400

TEXT_COLUMNS = frozenset(
    {
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
        "changes in results",
        "switched on by",
    }
)


def print_json(rows: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def print_table(title: str, columns: Mapping[str, Sequence[str]]) -> None:
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))  # names are text, never markup
    print(title)
    Console(width=None if sys.stdout.isatty() else UNLIMITED_WIDTH).print(table)


def note_extrapolations(outcomes: Iterable[Outcome | Advice]) -> None:
    """One line on stderr for each curve that was asked beyond its last point."""
    for name, workers, limit in dict.fromkeys(
        (outcome.network, outcome.workers, outcome.extrapolated_from_bytes) for outcome in outcomes
    ):
        if limit is not None:
            print(
                f"note: {name} was measured up to {limit:,} bytes on {workers} workers; "
                "larger messages continue its last slope",
                file=sys.stderr,
            )


def progress(items: Sequence[Item], *, doing: str) -> Iterator[Item]:
    """Items one by one, with a bar for work that may take seconds."""
    with progress_bar(len(items), doing=doing) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def progress_bar(total: int | None, *, doing: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr, moved on by what the block is given; nothing where nobody would see it.

    Without a total it only shows that something happens.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    from rich.progress import Progress  # slow to import, and only people see it

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


def milliseconds(seconds: float | None) -> str:
    """Nothing where nobody knows."""
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def percent(share: float | None) -> str:
    """Nothing where nobody knows."""
    return "" if share is None else f"{share:.1%}"

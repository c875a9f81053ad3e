"""Tables for people, JSON for machines, progress and notes on stderr."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from gradweave.simulation import Outcome

Item = TypeVar("Item")

# Where no terminal sets a width, a table is as wide as it needs to be.
UNLIMITED_WIDTH = 400

TEXT_COLUMNS = frozenset({"planner", "first tensor", "last tensor"})


def print_json(rows: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def print_table(title: str, columns: Mapping[str, Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else UNLIMITED_WIDTH).print(table)


def note_extrapolations(outcomes: Iterable[Outcome]) -> None:
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
    """A bar on stderr for work that may take seconds; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    from rich.progress import track  # slow to import, and only people see it

    yield from track(items, description=doing, console=console, transient=True)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def percent(share: float) -> str:
    return f"{share:.1%}"

"""Horizontal bars in a terminal, as long as what they stand for."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.bar import Bar as Drawn
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradweave._src.vocabulary import printable

# The longest bar is so wide that with names and notes all fits into 80 columns.
LONGEST = 34
WIDTH = 80


class Bar(NamedTuple):
    """One of several to compare, and what stands behind it."""

    name: str
    length: float
    text: str  # its length, for people
    note: str
    colour: str


def print_bars(bars: Sequence[Bar]) -> None:
    """Print bars whose widths are in the ratio of their lengths."""
    longest = max(bar.length for bar in bars)
    table = Table.grid(padding=(0, 1))
    for bar in bars:
        table.add_row(
            Text(f"   {printable(bar.name)}"),
            Drawn(longest, 0, bar.length, width=LONGEST, color=bar.colour),
            Text(bar.text, justify="right", style="bold"),
            Text(printable(bar.note)),
        )
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)

"""Making a table as narrow as a terminal without cutting a number.

Columns that say the same in every row are said once, headers are folded, long texts are folded,
long names are shortened in the middle. Where all of that is not enough, the rest of the columns
follows in a table of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len

from gradweave._src.vocabulary import ELLIPSIS

Kind = Literal["number", "name", "text"]

# A narrower name, or a narrower text, would say nothing.
LEAST_NAME, LEAST_TEXT = 18, 24
# A column takes so much beside its cells: two spaces and a line. A table ends with one line more.
BORDER = 3


class Column(NamedTuple):
    name: str
    cells: tuple[str, ...]
    kind: Kind

    @property
    def widest(self) -> int:
        """Return the column as wide as it would like to be."""
        return max(cell_len(self.name), self._cells)

    @property
    def folded(self) -> int:
        """Return the column with its header on several lines."""
        return max(self._header, self._cells)

    @property
    def least(self) -> int:
        """The width below which a number would be cut, or a name or text hard to read."""
        most = {"number": self._cells, "name": LEAST_NAME, "text": LEAST_TEXT}[self.kind]
        return max(self._header, min(self._cells, most))

    @property
    def _header(self) -> int:
        return max(map(cell_len, self.name.split()), default=0)

    @property
    def _cells(self) -> int:
        return max(map(cell_len, self.cells), default=0)


class Placed(NamedTuple):
    """A column, and how wide it is drawn."""

    column: Column
    width: int

    @property
    def cells(self) -> list[str]:
        if self.column.kind != "name":
            return list(self.column.cells)
        return [shortened(cell, self.width) for cell in self.column.cells]


class Fitted(NamedTuple):
    same: dict[str, str]  # in all rows, by column
    tables: list[list[Placed]]


def fit(columns: Sequence[Column], width: int) -> Fitted:
    """Return the tables to draw in a terminal of this width: usually one."""
    if drawn_width(column.widest for column in columns) <= width:
        return Fitted({}, [_placed(columns, width)])
    same = _same(columns)
    left = [column for column in columns if column.name not in same]
    if drawn_width(column.least for column in left) <= width:
        return Fitted(same, [_placed(left, width)])
    return Fitted(same, [_placed(part, width) for part in _parts(left, width)])


def shortened(name: str, width: int) -> str:
    """Return a name without its middle where it is too long: beginning and end tell names apart."""
    if cell_len(name) <= width:
        return name
    # At most as many characters as cells on either side, so that few lengths are tried.
    half = len(name) // 2
    left, right = min(half, width), max(half, len(name) - width)
    while left and cell_len(name[:left] + ELLIPSIS + name[right:]) > width:
        if left > len(name) - right:
            left -= 1
        else:
            right += 1
    return name[:left] + ELLIPSIS + name[right:]


def _same(columns: Sequence[Column]) -> dict[str, str]:
    """Return columns that are the same in all of several rows, but never all of them."""
    found = {
        column.name: column.cells[0]
        for column in columns
        if len(column.cells) > 1 and len(set(column.cells)) == 1
    }
    return found if len(found) < len(columns) else {}


def _placed(columns: Sequence[Column], width: int) -> list[Placed]:
    """Return columns with widths that fit; first headers give way, then texts, then names."""
    widths = {column.name: column.widest for column in columns}
    for kinds, narrowest in _WAYS_TO_GIVE:
        giving = [column for column in columns if column.kind in kinds]
        _narrow(widths, {column.name: narrowest(column) for column in giving}, width)
    return [Placed(column, widths[column.name]) for column in columns]


_WAYS_TO_GIVE: Sequence[tuple[Sequence[Kind], Callable[[Column], int]]] = (
    (("number", "name", "text"), lambda column: column.folded),
    (("text",), lambda column: column.least),
    (("name",), lambda column: column.least),
)


def _narrow(widths: dict[str, int], narrowest: Mapping[str, int], width: int) -> None:
    """Make the widest of these columns narrower until all fit or none has anything to give."""
    while drawn_width(widths.values()) > width:
        giving = [name for name, least in narrowest.items() if widths[name] > least]
        if not giving:
            return
        widths[max(giving, key=lambda name: widths[name])] -= 1


def _parts(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Divide columns into several tables, each of which begins with what tells the rows apart."""
    keys = _keys(columns)
    parts: list[list[Column]] = []
    for column in columns:
        if column in keys:
            continue
        if not parts or drawn_width(c.least for c in (*parts[-1], column)) > width:
            parts.append(list(keys))
        parts[-1].append(column)
    return parts


def _keys(columns: Sequence[Column]) -> list[Column]:
    """Return the first columns, as many as it takes until no two rows are the same."""
    rows = len(columns[0].cells)
    for count in range(1, len(columns)):
        first = columns[:count]
        if len(set(zip(*(column.cells for column in first), strict=True))) == rows:
            return list(first)
    return [column for column in columns[:-1] if column.kind == "name"]


def drawn_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths."""
    drawn = list(widths)
    return sum(drawn) + BORDER * len(drawn) + 1

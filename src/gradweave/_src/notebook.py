"""How values show themselves in notebooks: as a small table, or as a chart of lanes.

Values call this and hand over plain rows and bars. All text of theirs is escaped.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10
from typing import NamedTuple

from gradweave._src.vocabulary import printable, time_text

# Of more rows than this, the first and the last are shown.
MOST_ROWS = 12

# Of a chart, in units of its own; it is drawn as wide as there is space.
WIDTH, LEFT, LANE, BAR, AXIS = 800, 110, 30, 22, 24
# So wide that it can be seen and pointed at.
LEAST_WIDTH = 0.5
MOST_TICKS = 8
# Readable on light and on dark pages.
COLOURS = ("#4e8fc7", "#d9822b", "#3f9e63")


class Bar(NamedTuple):
    """Something that occupied a lane."""

    lane: str
    label: str
    start_s: float
    end_s: float


def table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as a table with a title, without columns that are empty."""
    used = [key for key in rows[0] if any(row[key] is not None for row in rows)] if rows else []
    header = "".join(f"<th>{_shown(key)}</th>" for key in used)
    body = "".join(_body([[row[key] for key in used] for row in rows]))
    return (
        f"<div><p><code>{_shown(title)}</code></p>"
        f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _body(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    half = MOST_ROWS // 2
    is_long = len(rows) > MOST_ROWS
    for row in rows[:half] if is_long else rows:
        yield _row(row)
    if is_long:
        left_out = f"… {len(rows) - 2 * half:,} more"
        yield f'<tr><td colspan="{len(rows[0])}">{left_out}</td></tr>'
        for row in rows[-half:]:
            yield _row(row)


def _row(row: Sequence[object]) -> str:
    return "<tr>" + "".join(map(_cell, row)) + "</tr>"


def _cell(value: object) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<td style="text-align: {side}">{_shown(_text(value))}</td>'


def _shown(text: str) -> str:
    return html.escape(printable(text))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def chart(title: str, lanes: Sequence[str], bars: Sequence[Bar]) -> str:
    """Return an image with bars on lanes over time; pointing at a bar tells what it is.

    The first lane is the topmost.
    """
    end_s = max((bar.end_s for bar in bars), default=0.0) or 1.0
    height = LANE * len(lanes) + AXIS
    drawn = [
        *(_lane(place, lane) for place, lane in enumerate(lanes)),
        *(_bar(bar, lanes.index(bar.lane), end_s) for bar in bars),
        *_axis(end_s, LANE * len(lanes)),
    ]
    return (
        f"<div><p><code>{_shown(title)}</code></p>"
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width: {WIDTH}px" role="img" '
        f'aria-label="{_shown(title)}" font-family="sans-serif" font-size="12" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg></div>'
    )


def _lane(place: int, name: str) -> str:
    y = place * LANE + LANE / 2 + 4
    return f'<text x="0" y="{y:g}" fill="currentColor">{_shown(name)}</text>'


def _bar(bar: Bar, place: int, end_s: float) -> str:
    x, until = _x(bar.start_s, end_s), _x(bar.end_s, end_s)
    y = place * LANE + (LANE - BAR) / 2
    told = f"{bar.label}: {time_text(bar.start_s)} to {time_text(bar.end_s)}"
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{max(LEAST_WIDTH, until - x):.2f}" height="{BAR}" '
        f'fill="{COLOURS[place % len(COLOURS)]}" fill-opacity="0.8" stroke="white" '
        f'stroke-width="0.3"><title>{_shown(told)}</title></rect>'
    )


def _axis(end_s: float, y: int) -> Iterator[str]:
    step_s = _tick_s(end_s)
    for number in range(floor(end_s / step_s) + 1):
        x = _x(number * step_s, end_s)
        side = "end" if x > WIDTH - LEFT / 2 else "middle"
        yield (
            f'<path d="M{x:.2f} 0V{y + 4}" stroke="currentColor" stroke-opacity="0.25"/>'
            f'<text x="{x:.2f}" y="{y + 18}" text-anchor="{side}" fill="currentColor">'
            f"{number * step_s * 1e3:g} ms</text>"
        )


def _tick_s(end_s: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that makes few enough ticks."""
    power = 10.0 ** floor(log10(end_s / MOST_TICKS))
    return next(m * power for m in (1, 2, 5, 10) if m * power * MOST_TICKS >= end_s)


def _x(moment_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT) * moment_s / end_s

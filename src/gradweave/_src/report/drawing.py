"""How the page's charts are drawn: by Vega-Lite, to SVG, when the page is made.

Colours are the page's variables, so that they follow light and dark. Each mark says what it shows
in its description, which the page shows on hover and focus. SVG cannot hold every character, so
names go through ``chart_of`` and ``in_order``. Channels are objects, such as ``alt.X("ms:Q")``: to
make one of a string, Altair would search its whole schema, which takes as long as drawing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode

from gradweave._src.vocabulary import all_printable, printable

Row = Mapping[str, str | float]

# Widths in pixels of a chart beside another one, and of one on a telephone.
WIDE, NARROW = 540, 324

SERIES = tuple(f"var(--b{number})" for number in range(8))


def chart_of(rows: Sequence[Row]) -> alt.Chart:
    """Begin a chart of rows, given as text: Altair would copy a list's rows in each call."""
    text = json.dumps(all_printable(rows))
    return alt.Chart(alt.InlineData(values=text, format=alt.JsonDataFormat(type="json")))


def in_order(names: Sequence[str]) -> list[str]:
    """Return the order of rows, in which names stand as the chart writes them."""
    return [printable(name) for name in names]


def colours_of(field: str, colours: Mapping[str, str]) -> alt.Color:
    return alt.Color(
        f"{field}:N",
        scale=alt.Scale(domain=in_order(list(colours)), range=list(colours.values())),
        legend=alt.Legend(
            title=None,
            orient="top",
            columns=min(len(colours), 2),
            labelLimit=220,
            symbolType="circle",
            symbolStrokeWidth=0,
        ),
    )


def dashes_of(field: str, dashes: Mapping[str, Sequence[int]]) -> alt.StrokeDash:
    return alt.StrokeDash(
        f"{field}:N",
        scale=alt.Scale(domain=in_order(list(dashes)), range=list(dashes.values())),
        legend=None,
    )


@contextmanager
def unchecked() -> Iterator[None]:
    """Make charts without Altair's checks of every part, which take longer than drawing them."""
    with debug_mode(arg=False):
        yield


def as_svg(chart: alt.LayerChart, width: int, *, height: int) -> str:
    """Draw a chart that is as wide as asked for, axes and labels included."""
    finished = chart.to_dict(validate=False) | {
        "width": width,
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 12, "right": 18, "top": 2, "bottom": 2},
        "config": {
            "background": "transparent",
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
            "legend": {"labelFontSize": 12, "columnPadding": 28},
        },
    }
    return vl_convert.vegalite_to_svg(finished, vl_version=alt.SCHEMA_VERSION.rpartition(".")[0])

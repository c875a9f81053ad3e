"""The shapes our pictures have in common: lines over workers or bytes, side by side in panels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt

Row = Mapping[str, str | float]

# Okabe and Ito's palette, which colour-blind readers can tell apart; black is the papers'.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, BLACK = "#56B4E9", "#D55E00", "#000000"

SOLID, DASHED, DOTTED, SPACED = (1, 0), (5, 3), (2, 2), (9, 5)


@dataclass(frozen=True, slots=True)
class Look:
    """How one series is drawn; dashes keep lines apart where they coincide."""

    colour: str
    dash: tuple[int, int] = SOLID


Looks = Mapping[str, Look]

PLANNERS: Looks = {
    "wfbp": Look(ORANGE),
    "single": Look(PURPLE, DASHED),
    "mgwfbp": Look(BLUE, DOTTED),
    "optimal": Look(GREEN, SPACED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field of the rows, and how it is laid out."""

    field: str
    title: str
    log_base: int | None = None  # None: linear, from zero
    format: str = ","
    ticks: Sequence[float] | None = None
    ends: tuple[float, float] | None = None  # None: those of the data

    def x(self) -> alt.X:
        return alt.X(f"{self.field}:Q", scale=self._scale(), axis=self._axis())

    def y(self) -> alt.Y:
        return alt.Y(f"{self.field}:Q", scale=self._scale(), axis=self._axis())

    def _scale(self) -> alt.Scale:
        domain = alt.Undefined if self.ends is None else list(self.ends)
        if self.log_base is None:
            return alt.Scale(zero=self.ends is None, domain=domain)
        return alt.Scale(type="log", base=self.log_base, nice=False, domain=domain)

    def _axis(self) -> alt.Axis:
        # Vega drops a label at the very end of an axis unless told not to.
        values = alt.Undefined if self.ticks is None else list(self.ticks)
        return alt.Axis(
            title=self.title,
            format=self.format,
            values=values,
            labelFlush=False,
            labelOverlap=self.ticks is None,
        )


LINE_LEGEND = alt.Legend(title=None, symbolType="stroke", symbolSize=400, labelLimit=300)
SQUARE_LEGEND = alt.Legend(title=None, symbolType="square", labelLimit=300)


def workers_axis(workers: Sequence[int], title: str = "workers") -> Axis:
    return Axis(field="workers", title=title, log_base=2, format="d", ticks=workers)


EFFICIENCY = Axis(field="efficiency", title="scaling efficiency", format="%")


def lines(
    rows: Sequence[Row],
    *,
    x: Axis,
    y: Axis,
    looks: Looks,
    size: tuple[int, int],
    points: bool = True,
) -> alt.Chart:
    """Draw one line per value of ``series``."""
    dots = alt.OverlayMarkDef(size=24, filled=True) if points else False
    dash = alt.StrokeDash(
        "series:N",
        scale=alt.Scale(domain=list(looks), range=[list(look.dash) for look in looks.values()]),
        legend=LINE_LEGEND,
    )
    width, height = size
    chart: alt.Chart = (
        data_chart(rows)
        .mark_line(point=dots, strokeWidth=2)
        .encode(x=x.x(), y=y.y(), color=colour(looks, LINE_LEGEND), strokeDash=dash)
        .properties(width=width, height=height)
    )
    return chart


def labelled_points(rows: Sequence[Row], *, x: Axis, y: Axis) -> tuple[alt.Chart, alt.Chart]:
    """Draw the papers' figures: black diamonds with ``label`` to their left."""
    points: alt.Chart = (
        data_chart(rows)
        .mark_point(shape="diamond", filled=True, size=70, color=BLACK, opacity=1)
        .encode(x=x.x(), y=y.y())
    )
    labels: alt.Chart = (
        data_chart(rows)
        .mark_text(align="right", dx=-7, fontSize=10, color=BLACK)
        .encode(x=x.x(), y=y.y(), text=alt.Text("label:N"))
    )
    return points, labels


def data_chart(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def colour(looks: Looks, legend: alt.Legend) -> alt.Color:
    return alt.Color(
        "series:N",
        scale=alt.Scale(domain=list(looks), range=[look.colour for look in looks.values()]),
        legend=legend,
    )


def in_panels(chart: alt.Chart, panels: Sequence[str], *, columns: int) -> alt.TopLevelMixin:
    """Draw one panel per value of ``panel``, in the given order."""
    header = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold")
    facet = alt.Facet("panel:N", sort=list(panels), header=header)
    panelled: alt.FacetChart = chart.facet(facet=facet, columns=columns, spacing=18)
    return panelled


def finished(chart: alt.TopLevelMixin, title: str) -> alt.TopLevelMixin:
    """Return the chart with the title that says what to see, and the legend below."""
    heading = alt.TitleParams(title, anchor="start", fontSize=13, offset=10)
    done: alt.TopLevelMixin = chart.properties(title=heading).configure(
        legend=alt.LegendConfig(orient="bottom", direction="horizontal"),
        axis=alt.AxisConfig(gridColor="#e6e6e6"),
        aria=False,  # smaller files; the page has the descriptions
    )
    return done

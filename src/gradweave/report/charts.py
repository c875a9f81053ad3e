"""Bars and curves as SVG, drawn by Vega-Lite when the page is made.

Colours are the page's variables, so that they follow light and dark. Each mark says what it shows
in its description, which the page shows on hover and focus.
"""

import io
from collections.abc import Iterable, Mapping, Sequence

import altair as alt
import numpy as np
from msgspec.structs import replace

from gradweave.costs import Cost, Curve, Line
from gradweave.costs.cost import FloatArray
from gradweave.kept import Steps
from gradweave.network import CollectiveCost, Network
from gradweave.results import Losses, LossSeries, Result
from gradweave.simulation import Outcome

Row = Mapping[str, str | float]

# Widths in pixels of a chart beside another one, and of one on a telephone.
WIDE, NARROW = 540, 324

SOLID, DASHED, DOTTED = [1, 0], [6, 4], [2, 3]

KINDS = {"measured": "var(--measured)", "predicted": "var(--predicted)"}
PLANNERS = {
    "wfbp": ("var(--b2)", DASHED),
    "single": ("var(--b3)", DASHED),
    "mgwfbp": ("var(--b0)", DOTTED),
    "optimal": ("var(--b1)", SOLID),
}
SERIES = tuple(f"var(--b{number})" for number in range(8))


def iteration_times(rows: Sequence[Result], width: int) -> str:
    """A pair of bars for each runtime, and a line where computing alone would end."""
    data: list[Row] = [
        {
            "runtime": row.runtime,
            "kind": kind,
            "ms": 1e3 * seconds,
            "text": f"{1e3 * seconds:,.1f}",
            "says": f"{row.runtime}, {kind}: {1e3 * seconds:,.1f} ms an iteration",
        }
        for row in rows
        for kind, seconds in (("measured", row.iteration_s), ("predicted", row.predicted_s))
        if seconds is not None
    ]
    longest_ms = max(1e3 * max(row.iteration_s, row.predicted_s or 0.0) for row in rows)
    base = _chart(data).encode(
        y=alt.Y(
            "runtime:N",
            sort=[row.runtime for row in rows],
            title=None,
            axis=alt.Axis(labelLimit=width // 4),
        ),
        yOffset=alt.YOffset("kind:N", sort=list(KINDS)),
        x=alt.X(
            "ms:Q",
            title="milliseconds an iteration",
            scale=alt.Scale(domain=[0, 1.2 * longest_ms], nice=False),
            axis=alt.Axis(tickCount=width // 100),
        ),
    )
    bars = base.mark_bar(cornerRadiusEnd=3).encode(
        color=_colours("kind", KINDS), description="says:N"
    )
    labels = base.mark_text(align="left", dx=4, fontSize=11, aria=False).encode(text="text:N")
    layers = [bars, labels]
    alone_s = [row.compute_s for row in rows if row.compute_s is not None]
    if alone_s:
        alone_ms = 1e3 * float(np.median(alone_s))
        layers.append(
            _chart([{"ms": alone_ms, "says": f"computing alone: {alone_ms:,.1f} ms"}])
            .mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color="var(--ink)")
            .encode(x="ms:Q", description="says:N")
        )
    return _svg(alt.LayerChart(layer=layers), width, height=46 * len(rows))


def scaling(outcomes: Sequence[Outcome], width: int) -> str:
    data: list[Row] = [
        {
            "workers": outcome.workers,
            "efficiency": outcome.efficiency,
            "planner": outcome.planner,
            "says": f"{outcome.planner} on {outcome.workers} workers: {outcome.efficiency:.1%} of "
            f"the ideal speed, {1e3 * outcome.iteration_s:,.1f} ms an iteration, "
            f"{outcome.messages} messages",
        }
        for outcome in outcomes
    ]
    counts = sorted({outcome.workers for outcome in outcomes})
    ticks = counts if width == WIDE else counts[1::2]
    colours = {name: colour for name, (colour, _) in PLANNERS.items()}
    dashes = {name: dash for name, (_, dash) in PLANNERS.items()}
    base = _chart(data).encode(
        x=alt.X(
            "workers:Q",
            title="workers",
            scale=alt.Scale(type="log", base=2, nice=False),
            axis=alt.Axis(values=ticks, format="d", grid=False, labelFlush=False),
        ),
        y=alt.Y(
            "efficiency:Q",
            title="share of the ideal speed",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format="%", tickCount=5),
        ),
        color=_colours("planner", colours),
    )
    lines = base.mark_line(strokeWidth=2.5, aria=False).encode(
        strokeDash=_dashes("planner", dashes)
    )
    points = base.mark_point(filled=True, size=60, opacity=1).encode(description="says:N")
    return _svg(alt.LayerChart(layer=[lines, points]), width, height=260)


def calibration(network: Network, collectives: Iterable[str], workers: int, width: int) -> str:
    """Points that were measured, the curve through them, and the line fitted to them."""
    drawn = [_Drawn(entry) for entry in _entries(network, collectives, workers)]
    sizes = [size for one in drawn for size in one.sizes] or [1024, 2**26]
    dense = np.geomspace(min(sizes), max(sizes), 40)
    data = [row for one in drawn for row in one.rows(dense)]
    colours = {one.name: SERIES[number % 8] for number, one in enumerate(drawn)}
    if network.links is not None:
        formula = network.cost("all-reduce", "ring", workers=workers)
        data += _line_rows("ring, by formula", formula, dense, "formula")
        colours["ring, by formula"] = "var(--ink-2)"
    return _svg(_calibration_layers(data, colours), width, height=260)


def _entries(network: Network, collectives: Iterable[str], workers: int) -> list[CollectiveCost]:
    wanted = set(collectives)
    return [
        entry
        for entry in network.costs
        if entry.operation == "all-reduce"
        and entry.collective in wanted
        and entry.workers == workers
    ]


class _Drawn:
    """One calibrated collective: its points and curve where there are some, and its line."""

    def __init__(self, entry: CollectiveCost) -> None:
        self.cost = entry.cost
        beside = "idle" if entry.beside == "nothing" else "beside compute"
        self.name = f"{entry.collective}, {beside}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.cost.nbytes if isinstance(self.cost, Curve) else ()

    def rows(self, dense: FloatArray) -> list[Row]:
        rows = _line_rows(self.name, self.cost.line(float(dense[-1])), dense, "fitted line")
        if isinstance(self.cost, Curve):
            rows += [
                {
                    "series": self.name,
                    "bytes": size,
                    "ms": 1e3 * seconds,
                    "drawn": "measured",
                    "says": f"{self.name}: {size:,} bytes take {1e3 * seconds:,.2f} ms",
                }
                for size, seconds in zip(self.cost.nbytes, self.cost.measured_s, strict=True)
            ]
        return rows


def _line_rows(series: str, cost: Cost, dense: FloatArray, drawn: str) -> list[Row]:
    line = cost if isinstance(cost, Line) else cost.line(float(dense[-1]))
    seconds = line.seconds(dense)
    return [
        {"series": series, "bytes": float(size), "ms": 1e3 * float(s), "drawn": drawn, "says": ""}
        for size, s in zip(dense, seconds, strict=True)
        if s > 0  # a free network has no place on a logarithmic axis
    ]


def _calibration_layers(data: Sequence[Row], colours: Mapping[str, str]) -> alt.LayerChart:
    base = _chart(data).encode(
        x=alt.X(
            "bytes:Q",
            title="bytes of a message",
            scale=alt.Scale(type="log", nice=False),
            axis=alt.Axis(format="~s", tickCount=5, grid=False),
        ),
        y=alt.Y(
            "ms:Q",
            title="milliseconds",
            scale=alt.Scale(type="log", nice=False),
            axis=alt.Axis(format="~g", values=_one_two_five(float(row["ms"]) for row in data)),
        ),
        color=_colours("series", colours),
    )
    dashes = {"measured": SOLID, "fitted line": DASHED, "formula": DOTTED}
    lines = base.mark_line(strokeWidth=2, aria=False).encode(
        strokeDash=_dashes("drawn", dashes), detail="drawn:N"
    )
    points = (
        base.mark_point(filled=True, size=50, opacity=1)
        .encode(description="says:N")
        .transform_filter(alt.datum.drawn == "measured")
    )
    return alt.LayerChart(layer=[lines, points])


def _one_two_five(numbers: Iterable[float]) -> list[float]:
    """The round numbers that a logarithmic axis over these ones shows."""
    found = list(numbers) or [1.0]
    decades = range(int(np.floor(np.log10(min(found)))), int(np.ceil(np.log10(max(found)))) + 1)
    return [first * 10.0**decade for decade in decades for first in (1, 2, 5)]


def loss_curves(losses: Losses, over: str, width: int) -> str:
    """``over`` is "steps" or "wall_s"."""
    title = {"steps": "steps", "wall_s": "seconds of training"}[over]
    data: list[Row] = [
        {
            "series": series.label,
            "x": x,
            "loss": loss,
            "says": f"{series.label}: loss {loss:.4g} after {step} steps, {wall_s:,.1f} s",
        }
        for series in losses.series
        for x, step, loss, wall_s in zip(
            getattr(series, over), series.steps, series.losses, series.wall_s, strict=True
        )
    ]
    colours = {series.label: SERIES[number % 8] for number, series in enumerate(losses.series)}
    base = _chart(data).encode(
        x=alt.X("x:Q", title=title, axis=alt.Axis(grid=False)),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=_colours("series", colours),
    )
    lines = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=24, opacity=1).encode(description="says:N")
    return _svg(alt.LayerChart(layer=[lines, points]), width, height=240)


def _chart(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def _colours(field: str, colours: Mapping[str, str]) -> alt.Color:
    return alt.Color(
        f"{field}:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(
            title=None,
            orient="top",
            columns=min(len(colours), 2),
            labelLimit=220,
            symbolType="circle",
            symbolStrokeWidth=0,
        ),
    )


def _dashes(field: str, dashes: Mapping[str, Sequence[int]]) -> alt.StrokeDash:
    return alt.StrokeDash(
        f"{field}:N",
        scale=alt.Scale(domain=list(dashes), range=list(dashes.values())),
        legend=None,
    )


def _svg(chart: alt.LayerChart, width: int, *, height: int) -> str:
    """As wide as asked for in all, axes and labels included."""
    finished = chart.properties(
        width=width,
        height=height,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        padding={"left": 12, "right": 18, "top": 2, "bottom": 2},
    ).configure(
        background="transparent",
        font="system-ui, sans-serif",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(labelFontSize=12, titleFontSize=12, titleFontWeight="normal"),
        legend=alt.LegendConfig(labelFontSize=12, columnPadding=28),
    )
    text = io.StringIO()
    finished.save(text, format="svg")
    return text.getvalue()


# More points than pixels show nothing, and make a large page.
MOST_POINTS = 400


def thinned(losses: Losses) -> Losses:
    """Curves of so many points at most, the first and the last among them."""
    return Losses(series=tuple(_thinned(series) for series in losses.series))


def _thinned(series: LossSeries) -> LossSeries:
    count = len(series.steps)
    if count <= MOST_POINTS:
        return series
    kept = np.unique(np.linspace(0, count - 1, MOST_POINTS).round().astype(int)).tolist()
    return replace(
        series,
        steps=tuple(series.steps[place] for place in kept),
        losses=tuple(series.losses[place] for place in kept),
        wall_s=tuple(series.wall_s[place] for place in kept),
    )


def step_times(steps: Steps, width: int) -> str:
    """How long each step took, coloured by the stage of planning that it belongs to.

    Of many steps, those of a stage that follow each other are drawn as their median.
    """
    together = -(-len(steps.step_s) // MOST_POINTS)
    data: list[Row] = []
    for stage, begin, end in _stages(steps):
        for first in range(begin, end, together):
            part = steps.step_s[first : min(end, first + together)]
            ms = 1e3 * float(np.median(part))
            last = first + len(part) - 1
            named = f"step {first}" if first == last else f"steps {first} to {last}"
            says = f"{named}, {stage}: {ms:,.1f} ms"
            data.append({"step": first, "ms": ms, "stage": stage, "says": says})
    found = dict.fromkeys(str(row["stage"]) for row in data)
    base = _chart(data).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(grid=False)),
        y=alt.Y("ms:Q", title="milliseconds a step", scale=alt.Scale(zero=True)),
    )
    line = base.mark_line(strokeWidth=1, color="var(--line)", aria=False)
    points = base.mark_point(filled=True, size=24, opacity=1).encode(
        description="says:N",
        color=_colours("stage", {stage: STAGES.get(stage, "var(--ink-2)") for stage in found}),
    )
    return _svg(alt.LayerChart(layer=[line, points]), width, height=240)


# How far planning has come, to the colour of its steps.
STAGES = {
    "not begun": "var(--ink-2)",
    "recording": "var(--b2)",
    "learning": "var(--b3)",
    "warming up": "var(--b6)",
    "trying": "var(--b1)",
    "settled": "var(--measured)",
}


def _stages(steps: Steps) -> list[tuple[str, int, int]]:
    """Each with its first step, and the first of the next one."""
    begins = [begin for begin in steps.stages if begin.step < len(steps.step_s)]
    ends = [*(begin.step for begin in begins[1:]), len(steps.step_s)]
    first = begins[0].step if begins else len(steps.step_s)
    before = [("unknown", 0, first)] if first else []
    return before + [(one.stage, one.step, end) for one, end in zip(begins, ends, strict=True)]

"""Bars and curves of runs: iteration times, more workers, and what messages cost."""

from collections.abc import Iterable, Mapping, Sequence

import altair as alt
import numpy as np

from gradweave._src.costs import Cost, Curve, Line
from gradweave._src.costs.cost import FloatArray
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.report.drawing import (
    SERIES,
    WIDE,
    Row,
    as_svg,
    chart_of,
    colours_of,
    dashes_of,
    in_order,
)
from gradweave._src.results import Result
from gradweave._src.simulation import Outcome

SOLID, DASHED, DOTTED = [1, 0], [6, 4], [2, 3]

KINDS = {"measured": "var(--measured)", "predicted": "var(--predicted)"}
PLANNERS = {
    "ddp": ("var(--b4)", SOLID),
    "wfbp": ("var(--b2)", DASHED),
    "single": ("var(--b3)", DASHED),
    "mgwfbp": ("var(--b0)", DOTTED),
    "optimal": ("var(--b1)", SOLID),
}


def iteration_times(rows: Sequence[Result], width: int) -> str:
    """Draw a pair of bars for each runtime, and a line where computing alone would end."""
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
    longest_ms = max(float(one["ms"]) for one in data)
    base = chart_of(data).encode(
        y=alt.Y(
            "runtime:N",
            sort=in_order([row.runtime for row in rows]),
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
        color=colours_of("kind", KINDS), description=alt.Description("says:N")
    )
    labels = base.mark_text(align="left", dx=4, fontSize=11, aria=False).encode(
        text=alt.Text("text:N")
    )
    layers = [bars]
    alone_s = [row.compute_s for row in rows if row.compute_s is not None]
    if alone_s:
        alone_ms = 1e3 * float(np.median(alone_s))
        layers.append(
            chart_of([{"ms": alone_ms, "says": f"computing alone: {alone_ms:,.1f} ms"}])
            .mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color="var(--ink)")
            .encode(x=alt.X("ms:Q"), description=alt.Description("says:N"))
        )
    return as_svg(alt.LayerChart(layer=[*layers, labels]), width, height=46 * len(rows))


# Labels of numbers of workers that differ by a smaller factor would collide.
APART = 1.5


def scaling(outcomes: Sequence[Outcome], rows: Sequence[Result], workers: int, width: int) -> str:
    """Draw what was simulated for all numbers of workers, and what was measured in the run."""
    data: list[Row] = [
        _scaling_row(outcome.planner, outcome.workers, outcome.efficiency, outcome.iteration_s)
        for outcome in outcomes
    ]
    measured: list[Row] = [
        {
            **_scaling_row(f"{row.runtime}, measured", workers, share, row.iteration_s),
            "planner": SAME_BUCKETS.get(row.runtime, row.runtime),
        }
        for row in rows
        if SAME_BUCKETS.get(row.runtime, row.runtime) in PLANNERS
        and (share := row.efficiency) is not None
    ]
    counts = sorted({outcome.workers for outcome in outcomes})
    others = [count for count in counts if not 1 / APART < count / workers < APART]
    ticks = sorted([workers, *(others if width == WIDE else others[1::2])])
    colours = {name: colour for name, (colour, _) in PLANNERS.items()}
    dashes = {name: dash for name, (_, dash) in PLANNERS.items()}
    base = chart_of(data).encode(
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
        color=colours_of("planner", colours),
    )
    lines = base.mark_line(strokeWidth=2.5, aria=False).encode(
        strokeDash=dashes_of("planner", dashes)
    )
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        description=alt.Description("says:N")
    )
    rings = base.mark_point(filled=False, size=190, strokeWidth=2, opacity=1).encode(
        description=alt.Description("says:N")
    )
    rings.data = chart_of(measured).data
    return as_svg(alt.LayerChart(layer=[lines, points, rings]), width, height=260)


# Runtimes that send what the planner of another name plans.
SAME_BUCKETS = {"torch-ddp": "ddp"}


def _scaling_row(name: str, workers: int, efficiency: float, iteration_s: float) -> Row:
    return {
        "planner": name,
        "workers": workers,
        "efficiency": min(1.0, efficiency),  # noise makes nobody faster than computing alone
        "says": f"{name}, on {workers} workers: {efficiency:.1%} of the ideal speed, "
        f"{1e3 * iteration_s:,.1f} ms an iteration",
    }


def calibration(network: Network, collectives: Iterable[str], workers: int, width: int) -> str:
    """Draw points that were measured, the curve through them, and the line fitted to them."""
    drawn = [_Drawn(entry) for entry in _entries(network, collectives, workers)]
    sizes = [size for one in drawn for size in one.sizes] or [1024, 2**26]
    dense = np.geomspace(min(sizes), max(sizes), 40)
    data = [row for one in drawn for row in one.rows(dense)]
    colours = {one.name: SERIES[number % 8] for number, one in enumerate(drawn)}
    if network.links is not None:
        formula = network.cost("all-reduce", "ring", workers=workers)
        data += _line_rows("ring, by formula", formula, dense, "formula")
        colours["ring, by formula"] = "var(--ink-2)"
    return as_svg(_calibration_layers(data, colours), width, height=260)


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
    base = chart_of(data).encode(
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
        color=colours_of("series", colours),
    )
    dashes = {"measured": SOLID, "fitted line": DASHED, "formula": DOTTED}
    lines = base.mark_line(strokeWidth=2, aria=False).encode(
        strokeDash=dashes_of("drawn", dashes), detail=alt.Detail("drawn:N")
    )
    points = (
        base.mark_point(filled=True, size=50, opacity=1)
        .encode(description=alt.Description("says:N"))
        .transform_filter(alt.datum.drawn == "measured")
    )
    return alt.LayerChart(layer=[lines, points])


def _one_two_five(numbers: Iterable[float]) -> list[float]:
    """Return the round numbers that a logarithmic axis over these ones shows."""
    found = list(numbers) or [1.0]
    decades = range(int(np.floor(np.log10(min(found)))), int(np.ceil(np.log10(max(found)))) + 1)
    return [first * 10.0**decade for decade in decades for first in (1, 2, 5)]

"""Curves of whole trainings: losses and step times, with the phases of planning marked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import altair as alt
import numpy as np

from gradweave.report.drawing import SERIES, Row, as_svg, chart_of, colours_of
from gradweave.results import Losses, LossSeries


class Axis(NamedTuple):
    """What training is drawn over: a title, and where the end of each step lies."""

    title: str
    place: Callable[[LossSeries, int], float]  # of the series' n-th entry


OVER = {
    "steps": Axis("steps", lambda series, entry: series.steps[entry]),
    "seconds": Axis("seconds of training", lambda series, entry: series.wall_s[entry]),
}


def loss_curves(losses: Losses, over: str, width: int) -> str:
    """``over`` is a name of OVER."""
    axis = OVER[over]
    data: list[Row] = [
        {
            "series": series.label,
            "x": axis.place(series, entry),
            "y": loss,
            "says": f"{series.label}: loss {loss:.4g} after {series.steps[entry]} steps, "
            f"{series.wall_s[entry]:,.1f} s",
        }
        for series in losses.series
        for entry, loss in enumerate(series.losses)
    ]
    base = _over_training(data, losses, axis.title, "loss")
    lines = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=24, opacity=1).encode(description="says:N")
    return as_svg(
        alt.LayerChart(layer=[*_phase_marks(losses, axis), lines, points]), width, height=240
    )


# In pixels from the top.
FIRST_NAME_AT, NAME_HEIGHT = 8, 14

# Of so many steps the median is drawn as one point of a line.
MEDIAN_OF = 9


def has_step_times(losses: Losses) -> bool:
    """Whether every step of every series is there, so that differences are steps."""
    return all(
        len(series.steps) > MEDIAN_OF
        and series.steps == tuple(range(series.steps[0], series.steps[0] + len(series.steps)))
        for series in losses.series
    )


def step_times(losses: Losses, width: int) -> str:
    """A dot for each step, a line through running medians; one slow step does not hide others."""
    data: list[Row] = []
    for series in losses.series:
        taken_ms = 1e3 * np.diff(np.array([0.0, *series.wall_s]))
        for entry, ms in enumerate(taken_ms):
            near = taken_ms[max(0, entry - MEDIAN_OF // 2) : entry + MEDIAN_OF // 2 + 1]
            data.append(
                {
                    "series": series.label,
                    "x": series.steps[entry],
                    "y": float(ms),
                    "median": float(np.median(near)),
                    "says": f"{series.label}: step {series.steps[entry] + 1} took {ms:,.1f} ms",
                }
            )
    most_ms = 1.25 * float(np.quantile([float(one["y"]) for one in data], 0.95))
    base = _over_training(data, losses, "steps", "milliseconds a step", most=most_ms)
    points = base.mark_point(filled=True, size=14, opacity=0.45, clip=True).encode(
        description="says:N"
    )
    lines = base.mark_line(strokeWidth=2.5, aria=False, clip=True).encode(y="median:Q")
    marks = _phase_marks(losses, OVER["steps"])
    return as_svg(alt.LayerChart(layer=[*marks, points, lines]), width, height=240)


def _over_training(
    data: Sequence[Row], losses: Losses, title: str, what: str, *, most: float | None = None
) -> alt.Chart:
    colours = {series.label: SERIES[number % 8] for number, series in enumerate(losses.series)}
    scale = alt.Scale(zero=False) if most is None else alt.Scale(domain=[0, most])
    return chart_of(data).encode(
        x=alt.X("x:Q", title=title, axis=alt.Axis(grid=False, tickCount=6)),
        y=alt.Y("y:Q", title=what, scale=scale),
        color=colours_of("series", colours),
    )


def _phase_marks(losses: Losses, axis: Axis) -> list[alt.Chart]:
    """A line where each phase of planning begins, with its name; nothing where nobody planned.

    Names stand below each other, for phases may be short.
    """
    planning = [series for series in losses.series if series.stages]
    begins = [(series, begin) for series in planning for begin in series.phases]
    marks = []
    for line, (series, begin) in enumerate(begins):
        name = begin.stage if len(planning) == 1 else f"{begin.stage} ({series.label})"
        row: Row = {
            "x": axis.place(series, _entry_before(series, begin.step)),
            "name": name,
            "says": f"{series.label}: {begin.stage} after {begin.step} steps",
        }
        base = chart_of([row]).encode(x="x:Q")
        rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, color="var(--ink-2)")
        text = base.mark_text(align="left", dx=4, fontSize=11, aria=False)
        height = alt.value(FIRST_NAME_AT + NAME_HEIGHT * line)
        marks += [rule.encode(description="says:N"), text.encode(text="name:N", y=height)]
    return marks


def _entry_before(series: LossSeries, step: int) -> int:
    """The last entry before this step, where its phase begins; the first where there is none."""
    return max((entry for entry, at in enumerate(series.steps) if at < step), default=0)

"""Curves of whole trainings: losses and step times, with the phases of planning marked."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import altair as alt
import numpy as np
from msgspec.structs import replace

from gradweave._src.report.drawing import SERIES, Row, as_svg, chart_of, colours_of
from gradweave._src.results import Losses, LossSeries, StageBegin, planning_phases

# More points than pixels show nothing, and make a large page.
MOST_POINTS = 400
HEIGHT = 240
# Where names of phases stand, in pixels from the top or, as losses fall, from the bottom.
FIRST_NAME_AT, NAME_HEIGHT = 8, 14


class Axis(NamedTuple):
    """What losses are drawn over: a title, and where an entry of a series lies."""

    title: str
    place: Callable[[LossSeries, int], float]


OVER = {
    "steps": Axis("steps", lambda series, entry: series.steps[entry]),
    "seconds": Axis("seconds of training", lambda series, entry: series.wall_s[entry]),
}


def loss_curves(losses: Losses, over: str, width: int) -> str:
    """Draw losses over steps or seconds; ``over`` is a name of OVER."""
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
    begins = [
        _Begin(series.label, one, axis.place(series, _entry_before(series, one.step)))
        for series in losses.series
        for one in series.phases
    ]
    labels = [series.label for series in losses.series]
    base = _over_training(data, labels, _time(axis.title, width), "loss", alt.Scale(zero=False))
    lines = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=24, opacity=1).encode(
        description=alt.Description("says:N")
    )
    rules, names = _phase_marks(begins, at_bottom=True)
    return as_svg(alt.LayerChart(layer=[*rules, lines, points, *names]), width, height=HEIGHT)


def _entry_before(series: LossSeries, step: int) -> int:
    """Return the last entry before this step, where its phase begins, or else the first."""
    return max((entry for entry, at in enumerate(series.steps) if at < step), default=0)


def thinned(losses: Losses) -> Losses:
    """Return curves with a limited number of points, the first and the last among them."""
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


class StepTimes(NamedTuple):
    """How long every step of a training took, from the first one on."""

    label: str
    step_s: Sequence[float]
    stages: tuple[StageBegin, ...]


def steps_of_losses(losses: Losses) -> list[StepTimes]:
    """Return the times of steps for those series that have an entry for every step."""
    return [
        StepTimes(series.label, np.diff([0.0, *series.wall_s]).tolist(), series.stages)
        for series in losses.series
        if series.steps == tuple(range(len(series.steps))) and len(series.steps) > 1
    ]


# Of so many steps the median is drawn as one point of a line.
MEDIAN_OF = 9
# Steps that take far longer than nearly all others are left out, or the curve would be flat.
NEARLY_ALL, ROOM_ABOVE = 0.95, 1.25


def step_times(trainings: Sequence[StepTimes], width: int) -> str:
    """Draw a dot for each step, or each few steps' median where they are many, and a trend."""
    data = [row for training in trainings for row in _step_rows(training)]
    begins = [
        _Begin(training.label, one, max(0, one.step - 0.5))
        for training in trainings
        for one in planning_phases(training.stages)
    ]
    most_ms = ROOM_ABOVE * float(np.quantile([float(row["y"]) for row in data], NEARLY_ALL))
    labels = [training.label for training in trainings]
    scale = alt.Scale(domain=[0, most_ms])
    base = _over_training(data, labels, _time("steps", width), "milliseconds a step", scale)
    points = base.mark_point(filled=True, size=10, opacity=1, clip=True).encode(
        description=alt.Description("says:N")
    )
    lines = base.mark_line(strokeWidth=2.5, aria=False, clip=True).encode(y=alt.Y("median:Q"))
    rules, names = _phase_marks(begins)
    return as_svg(alt.LayerChart(layer=[*rules, points, lines, *names]), width, height=HEIGHT)


def _step_rows(training: StepTimes) -> list[Row]:
    together = -(-len(training.step_s) // MOST_POINTS)
    firsts = range(0, len(training.step_s), together)
    parts = [training.step_s[first : first + together] for first in firsts]
    taken_ms = 1e3 * np.array([np.median(part) for part in parts])
    half = MEDIAN_OF // 2
    return [
        {
            "series": training.label,
            "x": first,
            "y": float(taken_ms[place]),
            "median": float(np.median(taken_ms[max(0, place - half) : place + half + 1])),
            "says": f"{training.label}: {_named(first, len(parts[place]))} "
            f"{taken_ms[place]:,.1f} ms",
        }
        for place, first in enumerate(firsts)
    ]


def _named(first: int, count: int) -> str:
    if count == 1:
        return f"step {first + 1} took"
    return f"steps {first + 1} to {first + count}, in the median"


def _time(title: str, width: int) -> alt.X:
    return alt.X("x:Q", title=title, axis=alt.Axis(grid=False, tickCount=width // 90))


def _over_training(
    data: Sequence[Row], labels: Sequence[str], time: alt.X, what: str, scale: alt.Scale
) -> alt.Chart:
    colours = {label: SERIES[number % 8] for number, label in enumerate(labels)}
    return chart_of(data).encode(
        x=time,
        y=alt.Y("y:Q", title=what, scale=scale),
        color=colours_of("series", colours),
    )


class _Begin(NamedTuple):
    """Where a phase of planning begins in a chart."""

    label: str  # of the training
    phase: StageBegin
    x: float


def _phase_marks(
    begins: Iterable[_Begin], *, at_bottom: bool = False
) -> tuple[list[alt.Chart], list[alt.Chart]]:
    """Return lines where phases begin, to draw below everything, and names, to draw above it.

    Names stand below each other, for phases may be short. Where several trainings plan, each is
    named.
    """
    drawn = list(begins)
    are_several = len({begin.label for begin in drawn}) > 1
    rules, names = [], []
    for line, (label, phase, x) in enumerate(drawn):
        row: Row = {
            "x": x,
            "name": f"{phase.stage} ({label})" if are_several else phase.stage,
            "says": f"{label}: {phase.stage} after {phase.step} steps",
        }
        base = chart_of([row]).encode(x=alt.X("x:Q"))
        rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, color="var(--ink-2)")
        rules.append(rule.encode(description=alt.Description("says:N")))
        from_edge = FIRST_NAME_AT + NAME_HEIGHT * line
        height = alt.value(HEIGHT - from_edge if at_bottom else from_edge)
        text = base.mark_text(align="left", dx=4, fontSize=11, aria=False)
        names.append(text.encode(text=alt.Text("name:N"), y=height))
    return rules, names

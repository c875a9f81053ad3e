"""The page and the picture of regret.py, from what it has measured."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import altair as alt
from msgspec import Struct

from gradweave._src.bench.peer_plans import TORCH, TUNED
from gradweave._src.bench.regret import (
    CACHED,
    RUNTIMES,
    STRETCH_STEPS,
    Turn,
    break_even_step,
    ratio_of_first,
    worst_stretch,
)
from gradweave._src.bench.training import OURS
from gradweave._src.results import StageBegin
from gradweave._src.session.findings import Stage

# What people wait for before they judge.
EARLY_STEPS = 100
NEVER = "never"  # where something has no end or does not come
COLUMNS = 3
COLOURS = {
    TORCH: "#969696",
    TUNED: "#9ecae1",
    OURS: "#e6550d",
    CACHED: "#31a354",
}

Run = tuple[Turn, ...]


class Measured(Struct, frozen=True, kw_only=True):
    """A case on a cluster, for so many steps."""

    case: str
    title: str
    nodes: int
    rate: str
    steps: int
    made_with: str
    runs: list[Run]

    @property
    def cluster(self) -> str:
        return f"{self.nodes} nodes at {self.rate}"

    @property
    def runtimes(self) -> list[str]:
        present = {turn.runtime for run in self.runs for turn in run}
        return [runtime for runtime in RUNTIMES if runtime in present]

    def turns(self, runtime: str) -> list[Turn]:
        return [turn for run in self.runs for turn in run if turn.runtime == runtime]

    def pairs(self, runtime: str) -> list[tuple[Turn, Turn]]:
        """Return each of a runtime's turns beside torch's of the same run."""
        found = []
        for run in self.runs:
            of_run = {turn.runtime: turn for turn in run}
            if runtime in of_run:
                found.append((of_run[runtime], of_run[TORCH]))
        return found

    def is_like(self, other: "Measured") -> bool:
        """Whether the runs of both belong together."""
        mine, others = ((one.case, one.cluster, one.steps) for one in (self, other))
        return mine == others


class Everything(Struct, frozen=True, kw_only=True):
    measured: list[Measured]


def page(everything: Everything, stem: str) -> str:
    lines = [
        "# Regret: what planning costs on its way to a plan",
        "",
        *_all_made_with(everything.measured),
        "",
        "Made by `python benchmarks/regret.py`, with `--nodes` and `--steps` as the tables say: "
        "emulated nodes, every step from the first one on. In each run all runtimes take their "
        "turns, with a fresh model under a fresh wrapper, and which is first alternates. "
        "`gradweave-cached` has the plan that the first run of `gradweave` remembered; where "
        "that run did not settle there was nothing to remember. Numbers are medians over the runs, "
        "in brackets the least and the largest; ratios are of two turns of the same run. Regret "
        "of a run that did not settle never ends. What each column means is in docs/measuring.md.",
    ]
    for cluster, found in _by_cluster(everything.measured).items():
        lines += ["", f"## {cluster}", "", *_cases(found), "", *_table(found), ""]
        lines += ["The step at which each stage of planning began:", "", *_stages(found)]
    if everything.measured:
        lines += [
            "",
            "## Time over steps",
            "",
            "How far each runtime is behind torch's own wrapper (below zero: ahead), in steps of "
            "that; medians over the runs. Vertical lines are where `gradweave` began its stages.",
            "",
            f"![time over steps]({stem}.svg)",
        ]
    return "\n".join(lines) + "\n"


def _all_made_with(measured: Iterable[Measured]) -> list[str]:
    """Say what was measured with what: once, or for each of the cases where they differ."""
    cases_of: dict[str, list[str]] = {}
    for one in measured:
        cases_of.setdefault(one.made_with, []).append(f"{one.case} ({one.cluster})")
    if len(cases_of) == 1:
        return list(cases_of)
    return [f"- {made_with} {', '.join(cases)}" for made_with, cases in cases_of.items()]


def _by_cluster(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for one in measured:
        found.setdefault(one.cluster, []).append(one)
    return found


def _cases(found: Iterable[Measured]) -> list[str]:
    return [f"- {case}: {title}" for case, title in {one.case: one.title for one in found}.items()]


def _table(found: Iterable[Measured]) -> list[str]:
    lines = [
        "| case | steps | runs | runtime | messages | settled step, ms | of torch's "
        f"| predicted, ms | s in all | first {EARLY_STEPS} steps, of torch's "
        "| all steps, of torch's | regret, steps | break-even, step "
        f"| worst {STRETCH_STEPS} steps |",
        f"|---|---:|---:|---|{'---:|' * 10}",
    ]
    for one in found:
        for runtime in one.runtimes:
            turns = one.turns(runtime)
            cells = [
                one.case,
                one.steps,
                len(turns),
                f"{runtime}{_cap(turns[0])}",
                _spread([turn.messages for turn in turns], "{:.0f}"),
                _spread([_milliseconds(turn.settled_s) for turn in turns], "{:,.0f}"),
                _compared(one, runtime, _settled_ratio, "{:.3f}"),
                _spread([_milliseconds(turn.predicted_s) for turn in turns], "{:,.0f}"),
                _spread([turn.total_s for turn in turns], "{:,.1f}"),
                _compared(one, runtime, _early_ratio, "{:.3f}"),
                _compared(one, runtime, _ratio, "{:.3f}"),
                _spread(map(_regret, turns), "{:.1f}"),
                _compared(one, runtime, _break_even, "{:.0f}"),
                _compared(one, runtime, worst_stretch, "{:.3f}"),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _stages(found: Sequence[Measured]) -> list[str]:
    rows = [
        (one, runtime, turns)
        for one in found
        for runtime in one.runtimes
        for turns in [one.turns(runtime)]
        if any(turn.stages for turn in turns)
    ]
    stages = _stage_names([turn for _, _, turns in rows for turn in turns])
    lines = [
        f"| case | steps | runtime | wrapping, ms | {' | '.join(stages)} | runs that settled |",
        f"|---|---:|---|---:|{'---:|' * len(stages)}---:|",
    ]
    for one, runtime, turns in rows:
        begins = [_spread([begin_of(turn, stage) for turn in turns], "{:.0f}") for stage in stages]
        settled = sum(turn.settled_s is not None for turn in turns)
        wrapping = _spread([turn.wrapping_s * 1e3 for turn in turns], "{:,.0f}")
        lines.append(
            f"| {one.case} | {one.steps} | {runtime} | {wrapping} | {' | '.join(begins)} "
            f"| {settled} of {len(turns)} |"
        )
    return lines


def _stage_names(turns: Iterable[Turn]) -> list[Stage]:
    """Return the stages that were seen, in the order in which planning comes to them."""
    seen = {begin.stage for turn in turns for begin in turn.stages}
    return [stage for stage in Stage if stage in seen]


def begin_of(turn: Turn, stage: str) -> float | None:
    """Return the first step of a stage, of its first time where there were several."""
    return next((float(begin.step) for begin in turn.stages if begin.stage == stage), None)


def _compared(
    one: Measured, runtime: str, compare: Callable[[Turn, Turn], float | None], form: str
) -> str:
    if runtime == TORCH:
        return ""
    return _spread([compare(ours, torchs) for ours, torchs in one.pairs(runtime)], form)


def _settled_ratio(ours: Turn, torchs: Turn) -> float | None:
    our_s, torch_s = ours.settled_s, torchs.settled_s
    return None if our_s is None or torch_s is None else our_s / torch_s


def _early_ratio(ours: Turn, torchs: Turn) -> float:
    return ratio_of_first(ours, torchs, steps=EARLY_STEPS)


def _ratio(ours: Turn, torchs: Turn) -> float:
    return ratio_of_first(ours, torchs, steps=ours.steps)


def _break_even(ours: Turn, torchs: Turn) -> float:
    """Return the step of break-even; infinity, which sorts last, where it never comes."""
    step = break_even_step(ours, torchs)
    return math.inf if step is None else step


def _regret(turn: Turn) -> float:
    """Return the regret in steps; infinity for a run that has not settled."""
    regret = turn.regret_steps
    return math.inf if regret is None else regret


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _spread(numbers: Iterable[float | None], form: str) -> str:
    """Return the median and the range of those numbers that are not None, as text."""
    known = sorted(number for number in numbers if number is not None)
    if not known:
        return ""

    def text(number: float) -> str:
        return NEVER if math.isinf(number) else form.format(number)

    middle, least, most = map(text, (median(known), known[0], known[-1]))
    return middle if least == most else f"{middle} ({least}…{most})"


def _cap(turn: Turn) -> str:
    return "" if turn.bucket_cap_mb is None else f" ({turn.bucket_cap_mb:g} MiB)"


def draw(everything: Everything, output: Path) -> None:
    """Draw a small chart for each case, a row of them for each cluster."""
    rows = [
        alt.concat(*(_chart(one) for one in found), columns=COLUMNS).properties(title=cluster)
        for cluster, found in _by_cluster(everything.measured).items()
    ]
    if rows:
        alt.vconcat(*rows).save(output)


def _chart(one: Measured) -> alt.LayerChart:
    steps = alt.X("step:Q", scale=alt.Scale(domain=[0, one.steps], nice=False), title="step")
    lines = (
        alt.Chart(alt.InlineData(values=_behind(one)))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=steps,
            y=alt.Y("behind:Q", title="steps behind torch-ddp"),
            color=alt.Color(
                "runtime:N",
                title=None,
                scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
            ),
        )
    )
    begins = enumerate(_begins(one))
    marks = [mark for place, begin in begins for mark in _marks(begin, place, steps)]
    return alt.LayerChart(layer=[lines, *marks]).properties(
        width=260, height=160, title=f"{one.case}, {one.steps} steps"
    )


def _marks(begin: StageBegin, place: int, steps: alt.X) -> tuple[alt.Chart, alt.Chart]:
    """Return a line, and the stage's name beside it, below the names of stages before."""
    base = alt.Chart(alt.InlineData(values=[{"stage": begin.stage, "step": begin.step}]))
    line = base.mark_rule(color=COLOURS[OURS], strokeDash=[3, 3], strokeWidth=0.7)
    name = base.mark_text(align="left", baseline="top", dx=3, dy=2 + 11 * place, fontSize=9)
    return line.encode(x=steps), name.encode(x=steps, y=alt.value(0), text="stage:N")


def _behind(one: Measured) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for runtime in one.runtimes:
        pairs = one.pairs(runtime)
        unit_s = median(torchs.settled_s or torchs.total_s / one.steps for _, torchs in pairs)
        for step in range(one.steps):
            behind_s = median(a.step_ends_s[step] - b.step_ends_s[step] for a, b in pairs)
            rows.append({"runtime": runtime, "step": step + 1, "behind": behind_s / unit_s})
    return rows


def _begins(one: Measured) -> list[StageBegin]:
    """Return where stages begin, as medians over the runs, without those of the first step."""
    turns = one.turns(OURS)
    found = []
    for stage in _stage_names(turns):
        steps = [step for turn in turns if (step := begin_of(turn, stage)) is not None]
        found.append(StageBegin(stage, round(median(steps))))
    return [begin for begin in found if begin.step > 1]

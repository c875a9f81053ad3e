"""One page to look at runs with: everything in it, nothing loaded.

The charts are drawn here, by Vega-Lite; timelines, plans and what-if in the browser, by the scripts
in assets/. A content security policy in the page forbids every request and every other script.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.advice import Option, advise
from gradweave._src.errors import UnknownCost
from gradweave._src.phases import PHASES, Phases
from gradweave._src.report import charts, training_charts
from gradweave._src.report.document import WIRES, document
from gradweave._src.report.drawing import NARROW, WIDE, unchecked
from gradweave._src.report.folders import Folder
from gradweave._src.report.inline import asset, embedded, policy_hash, template
from gradweave._src.report.pricing import Price, known_price
from gradweave._src.report.runtimes import explained, glossary, is_lossy, rows_in_order
from gradweave._src.report.sentences import about, about_learnt, about_lossy, headline, side_by_side
from gradweave._src.report.training_charts import StepTimes
from gradweave._src.results import Losses, Result
from gradweave._src.simulation import PAPER_WORKERS, Outcome, cases, run
from gradweave._src.vocabulary import count_text, milliseconds

# The order matters: each script uses what those before it define.
SCRIPTS = (
    "planner.js",
    "format.js",
    "explore.js",
    "gantt.js",
    "skyline.js",
    "what_if.js",
    "main.js",
)
SEVERAL = 2


class Chart(Struct, frozen=True, kw_only=True):
    """The same chart for a screen and for a telephone."""

    wide: Markup
    narrow: Markup


def make_page(folders: Sequence[Folder]) -> str:
    style, script = asset("page.css"), "\n".join(asset(name) for name in SCRIPTS)
    runs = [_run(folder) for folder in folders]
    names = [row.runtime for folder in folders for row in rows_in_order(folder.run)]
    return template("page.html").render(
        runs=runs,
        compared=_compared(folders),
        rough=about_learnt([one for one in folders if known_price(one) is not None]),
        wires=list(WIRES),
        glossary=glossary([*names, *charts.PLANNERS]),
        data=embedded(document(folders)),
        style=Markup(style),  # noqa: S704 our own file
        script=Markup(script),  # noqa: S704 our own files
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
    )


def _run(folder: Folder) -> dict[str, Any]:
    rows = rows_in_order(folder.run)
    steps = _step_times(folder)
    return {
        "title": folder.name,
        "headline": headline(folder.run),
        "lossy": about_lossy(folder),
        "about": about(folder),
        "wrong": [row.runtime for row in rows if row.correct is False],
        "command": folder.run.results.command,
        "workers": folder.workers,
        "collective": None if (price := known_price(folder)) is None else price.collective,
        "times": _chart(lambda width: charts.iteration_times(rows, width)),
        "scaling": _scaling(folder, rows),
        "calibration": _calibration(folder),
        "losses": [] if folder.losses is None else _losses(folder.losses),
        "step_times": _chart(partial(training_charts.step_times, steps)) if steps else None,
        "ranks": _ranks(folder),
        "explanation": _explanation(folder),
        "has_phases": any(one.stages for one in steps),
        "advice": _advice(folder),
        "compared": any(row.speedup is not None for row in rows),
        "rounds": max(len(row.repeats_s) for row in rows),
        "rows": [_numbers(row) for row in rows],
        "runtimes": [_runtime(row, folder) for row in rows],
    }


def _runtime(row: Result, folder: Folder) -> dict[str, Any]:
    run, name = folder.run, row.runtime
    missing = [
        kind
        for kind, timelines in (("measured", run.measured), ("predicted", run.predicted))
        if name not in timelines
    ]
    return {
        "name": name,
        "explained": explained(name),
        "lossy": is_lossy(name, run.plans.get(name)),
        "note": _note(row),
        "messages": count_text(row.messages, "message"),
        "has_timeline": len(missing) < len(("measured", "predicted")),
        "missing": " or ".join(missing),
    }


def _chart(draw: Callable[[int], str]) -> Chart:
    """Draw a chart in both widths; its text is safe, for Vega-Lite escapes what it draws."""
    with unchecked():
        return Chart(wide=Markup(draw(WIDE)), narrow=Markup(draw(NARROW)))  # noqa: S704


def _scaling(folder: Folder, rows: Sequence[Result]) -> Chart | None:
    """Draw scaling from what was measured in the run, so that it agrees with its neighbours."""
    price = known_price(folder)
    if price is None:
        return None
    outcomes = scaled_outcomes(folder, price)
    return _chart(lambda width: charts.scaling(outcomes, rows, price.workers, width))


def scaled_outcomes(folder: Folder, price: Price) -> list[Outcome]:
    """Simulate every planner of the chart on every number of workers, the run's included."""
    return [
        run(case).outcome
        for workers in sorted({*PAPER_WORKERS, price.workers})
        for case in cases(
            [folder.run.trace],
            [price.among(workers).network("as in the run")],
            workers=[workers],
            planners=list(charts.PLANNERS),
            collectives=[price.collective],
        )
    ]


def _calibration(folder: Folder) -> Chart | None:
    network, workers, price = folder.run.network, folder.workers, known_price(folder)
    if network is None or price is None:
        return None
    plans = folder.run.plans.values()
    used = {price.collective, *(bucket.collective for plan in plans for bucket in plan.buckets)}
    return _chart(lambda width: charts.calibration(network, used, workers, width))


def _losses(losses: Losses) -> list[Chart]:
    curves, drawn = training_charts.loss_curves, training_charts.thinned(losses)
    return [_chart(partial(curves, drawn, over)) for over in training_charts.OVER]


def _step_times(folder: Folder) -> list[StepTimes]:
    """Return all steps of a training; of a benchmark, those that its losses tell about."""
    steps = folder.run.steps
    if steps is not None:
        return [StepTimes(folder.run.results.rows[0].runtime, steps.step_s, steps.stages)]
    return [] if folder.losses is None else training_charts.steps_of_losses(folder.losses)


def _ranks(folder: Folder) -> list[dict[str, str]]:
    """Return what each rank did in a step of a training, phase by phase."""
    steps = folder.run.steps
    return [] if steps is None else [_rank(number, one) for number, one in enumerate(steps.phases)]


def _rank(rank: int, phases: Phases | None) -> dict[str, str]:
    lengths: dict[str, str] = {
        name: "" if phases is None else milliseconds(phases.seconds(name)) for name in PHASES
    }
    step = "" if phases is None else milliseconds(phases.step_s)
    return {"rank": f"rank {rank}", "step": step, **lengths}


def _explanation(folder: Folder) -> list[str]:
    """Return what a training's wrapper says about its plan, line by line."""
    account = folder.run.account
    return [] if account is None else account.explanation.splitlines()


def _compared(folders: Sequence[Folder]) -> dict[str, Any] | None:
    """Put trainings side by side; None where there are not several."""
    trainings = [folder for folder in folders if folder.run.steps is not None]
    if len(trainings) < SEVERAL:
        return None
    named = list(zip(_apart([folder.name for folder in trainings]), trainings, strict=True))
    rows = [
        replace(row, runtime=f"{name}: {row.runtime}")
        for name, folder in named
        for row in folder.run.results.rows
    ]
    curves = [
        replace(series, label=f"{name}: {series.label}")
        for name, folder in named
        for series in (() if folder.losses is None else folder.losses.series)
    ]
    return {
        "sentence": side_by_side({name: folder.run for name, folder in named}),
        "times": _chart(lambda width: charts.iteration_times(rows, width)),
        "losses": _losses(Losses(series=tuple(curves))) if len(curves) > 1 else [],
    }


def _apart(names: Sequence[str]) -> list[str]:
    """Return the same names, with a number where one stands twice."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _advice(folder: Folder) -> dict[str, Any] | None:
    """Return what else could be done, and why the first is first; or why nothing is known."""
    network = folder.run.network
    if network is None:
        return None
    try:
        advice = advise(folder.run.trace, network, workers=folder.workers)
    except UnknownCost as error:
        return {"why": f"Nothing can be compared: {error}.", "options": [], "unpriced": []}
    return {
        "why": advice.why,
        "options": [_advised(option) for option in advice.options],
        "unpriced": advice.unpriced,
    }


def _advised(option: Option) -> dict[str, str]:
    return {
        "name": option.name,
        "step": milliseconds(option.step_s),
        "samples": f"{option.samples_per_s:,.0f}",
        "gain": f"{option.gain:.2f}x",
        "memory": f"{option.memory_bytes / 1e6:,.0f}",
        "changes": option.changes,
        "code": option.code,
    }


def _numbers(row: Result) -> dict[str, str]:
    return {
        "runtime": row.runtime,
        "measured": milliseconds(row.iteration_s),
        "predicted": milliseconds(row.predicted_s),
        "error": "" if row.prediction_error is None else f"{row.prediction_error:+.1%}",
        "exposed": milliseconds(row.exposed_s),
        "messages": f"{row.messages:,}",
        "speedup": "" if row.speedup is None else f"{row.speedup:.2f}x",
    }


def _note(row: Result) -> str:
    cap = "" if row.bucket_cap_mb is None else f", bucket_cap_mb {row.bucket_cap_mb:g}"
    taken = f"an iteration takes {milliseconds(row.iteration_s)} ms in the median"
    if row.predicted_s is None or row.prediction_error is None:
        return f"{count_text(row.messages, 'message')}{cap}; {taken}"
    expected = f"{milliseconds(row.predicted_s)} ms were predicted ({row.prediction_error:+.1%})"
    return f"{count_text(row.messages, 'message')}{cap}; {taken}, {expected}"

"""gTop-k, Fig. 10: scaling efficiency of four models on 1 GbE, without overlap."""

import altair as alt

from . import charts
from .gtopk_exchange import LOOKS, METHODS
from .gtopk_models import LARGEST, MODELS, WORKERS
from .page import Section, claim, differences, paragraph, picture, table, whole_percent


def section() -> Section:
    name = "results-gtopk-efficiency"
    return Section(
        title="Scaling efficiency over workers (its Fig. 10)",
        parts=[
            picture(name, "scaling efficiency of four models over workers"),
            efficiency_table(),
            paragraph(how_efficiency_is_made()),
            differences([lower_efficiency()]),
        ],
        pictures={name: efficiency_chart()},
    )


def efficiency_table() -> str:
    header = ["", *(f"{workers} workers" for workers in WORKERS)]
    header.append(f"{LARGEST} workers, measured by the paper")
    rows = [
        [
            f"{model.name}, {method}",
            *(whole_percent(model.efficiency(method, workers)) for workers in WORKERS),
            whole_percent(model.paper_efficiency(method)),
        ]
        for model in MODELS
        for method in METHODS
    ]
    return table(header, rows)


def how_efficiency_is_made() -> str:
    return """
        Compute times are the paper's (Table VI), gradient sizes those of the shipped models, and
        nothing overlaps, as in the paper. The last column is its Table VII over 32 times its Table
        VI.
    """


def lower_efficiency() -> str:
    return claim(
        """Every measured efficiency is below the model's, for reasons that Table VII shows (next
        section).""",
        holds=all(
            m.paper_efficiency(x) < m.efficiency(x, LARGEST) for m in MODELS for x in METHODS
        ),
    )


def efficiency_chart() -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {
            "panel": model.name,
            "series": method,
            "workers": workers,
            "efficiency": model.efficiency(method, workers),
        }
        for model in MODELS
        for method in METHODS
        for workers in WORKERS
    ]
    lines = charts.lines(
        rows,
        x=charts.workers_axis(WORKERS),
        y=charts.EFFICIENCY,
        looks=LOOKS,
        size=(290, 120),
    )
    least = min(model.efficiency("gTop-k", workers) for model in MODELS for workers in WORKERS)
    title = claim(
        f"By the cost model, gTop-k keeps above {int(least * 20) * 5} % efficiency on 1 GbE",
        holds=least > 0.8,
    )
    panels = charts.in_panels(lines, [model.name for model in MODELS], columns=2)
    return charts.finished(panels, title)

"""Linear Pipeline, Fig. 4: over workers."""

from collections.abc import Mapping

import altair as alt

from gradweave._src.vocabulary import Operation, size_text

from . import charts
from .linear_pipeline_costs import (
    COLLECTIVES,
    LOOKS,
    OPERATIONS,
    PAPER_BLOCK,
    WORKER_BYTES,
    WORKERS,
    block_bytes,
    megabytes,
    seconds,
)
from .page import Section, claim, differences, paragraph, picture, table


def section() -> Section:
    name = "results-linear-pipeline-workers"
    return Section(
        title=f"Over workers, {megabytes(WORKER_BYTES)} (its Fig. 4)",
        parts=[
            picture(name, "time over workers"),
            workers_table(),
            paragraph(flatness()),
            differences([steps_difference(), exchange_difference()]),
        ],
        pictures={name: workers_chart()},
    )


def workers_table() -> str:
    header = ["ms", *(f"{workers} workers" for workers in WORKERS)]
    rows = []
    for operation in OPERATIONS:
        for collective in COLLECTIVES:
            found = [at_workers(operation, collective, workers) * 1e3 for workers in WORKERS]
            rows.append([f"{operation}, `{collective}`", *(f"{value:.1f}" for value in found)])
        blocks = [block_bytes(operation, nbytes=WORKER_BYTES, workers=w) for w in WORKERS]
        rows.append([f"{operation}, best block", *(size_text(block) for block in blocks)])
    return table(header, rows)


def at_workers(operation: Operation, collective: str, workers: int) -> float:
    return seconds(operation, collective, nbytes=WORKER_BYTES, workers=workers)


# With two workers, sums of a fused all-reduce return while blocks are still sent, and take no time
# of their own.
FEWEST: Mapping[Operation, int] = {"broadcast": 2, "reduce": 2, "all-reduce": 3}


def growth(collective: str) -> float:
    """Return the largest growth of an operation's time from the fewest to the most workers."""
    return max(
        at_workers(operation, collective, WORKERS[-1]) / at_workers(operation, collective, fewest)
        for operation, fewest in FEWEST.items()
    )


def flatness() -> str:
    pipeline = growth("linear-pipeline") - 1
    blocked = growth(f"linear-pipeline:{PAPER_BLOCK}") - 1
    return claim(
        f"""From {WORKERS[0]} to {WORKERS[-1]} workers the pipeline's time grows by at most
        {pipeline * 100:.1f} % ({blocked * 100:.1f} % with the paper's block) and the tree's
        {growth("mst"):.0f}-fold; a fused all-reduce is counted from {FEWEST["all-reduce"]} workers,
        for between two of them sums return while blocks are still sent. The paper's Fig. 4 measures
        the same: flat from 2 to 4 GPUs and again from 5 to 6.""",
        holds=pipeline < 0.01 and blocked < 0.02 and growth("mst") > 2.9,
    )


def steps_difference() -> str:
    return """The paper's curves jump from 4 to 5 GPUs, where messages have to cross to the other
        processor through the memory of the host. One kind of link, as here, has no such step."""


def exchange_difference() -> str:
    return """The paper's exchange grows almost linearly with the GPUs; it is Open MPI's again, with
        its copies through the host. By the formula it approaches twice the message."""


def workers_chart() -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {
            "panel": operation,
            "series": collective,
            "workers": workers,
            "ms": at_workers(operation, collective, workers) * 1e3,
        }
        for operation in OPERATIONS
        for collective in LOOKS
        for workers in WORKERS
    ]
    count = charts.Axis(
        field="workers", title="workers", format="d", ticks=WORKERS, ends=(WORKERS[0], WORKERS[-1])
    )
    time = charts.Axis(field="ms", title="ms", format="d")
    lines = charts.lines(rows, x=count, y=time, looks=LOOKS, size=(185, 190))
    title = f"{megabytes(WORKER_BYTES)}: the pipeline's time does not grow with the workers"
    panels = charts.in_panels(lines, OPERATIONS, columns=3)
    return charts.finished(panels, claim(title, holds=growth("linear-pipeline") < 1.01))

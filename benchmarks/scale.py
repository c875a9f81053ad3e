"""How three models scale to 100,000 workers on tiers, on paper: writes docs/scale.md.

    python benchmarks/scale.py docs

Everything is computed from shipped traces and the networks ``tiers-1gbe``, ``tiers-10gbe`` and
``tiers-100gbe``; nothing is measured but the seconds that the schedule simulator takes.
"""

import sys
import time
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from gradweave import load_network, load_trace
from gradweave._src.collectives import stages_of
from gradweave._src.compression import parse_compression
from gradweave._src.simulation import HOUR_S, Failures, Outcome, cases, run, survival
from gradweave._src.simulation.classes import classes_of, simulate_classes
from gradweave._src.vocabulary import Passes
from papers import charts
from papers.page import table

MODELS = ("resnet50", "bert-large", "llama-1b")
RATES = (1, 10, 100)
WORKERS = (8, 40, 200, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ALL = WORKERS[-1]
TIERED = "blueconnect:pat"


class Course(NamedTuple):
    """One way to train, and how it is drawn."""

    planner: str
    collective: str
    look: charts.Look
    passes: Passes = "backward"
    compression: str | None = None


COURSES = {
    "DDP's buckets, ring": Course("ddp", "ring", charts.Look(charts.BLACK, charts.DOTTED)),
    "optimal, ring": Course("optimal", "ring", charts.Look(charts.PURPLE, charts.DASHED)),
    "DDP's buckets, tiers": Course("ddp", TIERED, charts.Look(charts.ORANGE)),
    "optimal, tiers": Course("optimal", TIERED, charts.Look(charts.GREEN)),
    "both passes, tiers": Course("optimal", TIERED, charts.Look(charts.BLUE), passes="both"),
    "optimal, tiers, bf16": Course(
        "optimal", TIERED, charts.Look(charts.SKY, charts.DASHED), compression="bf16"
    ),
    "optimal, tiers, int8": Course(
        "optimal", TIERED, charts.Look(charts.VERMILION, charts.DASHED), compression="int8"
    ),
}

FAILURES = Failures(rank_mtbf_s=50_000 * HOUR_S, restart_s=300.0, checkpoint_s=30.0)
SCHEDULES = ("ring", "pat", "blueconnect:ring", TIERED)
MESSAGE_BYTES = 100_000_000


@cache
def outcome(model: str, rate: int, course: str, workers: int) -> Outcome:
    how = COURSES[course]
    network = load_network(f"tiers-{rate}gbe")
    (case,) = cases(
        [load_trace(model).with_bytes_per_element(4)],
        [network],
        workers=[workers],
        planners=[how.planner],
        collectives=[how.collective],
        compression=None if how.compression is None else parse_compression(how.compression),
        passes=[how.passes],
    )
    return run(case).outcome


def efficiencies(model: str) -> str:
    rows = [
        [
            f"{rate} Gbit/s, {course}",
            *(f"{outcome(model, rate, course, workers).efficiency:.1%}" for workers in WORKERS),
        ]
        for rate in RATES
        for course in COURSES
    ]
    return table([f"{model}, workers:", *(f"{workers:,}" for workers in WORKERS)], rows)


def last_with(model: str, rate: int, course: str, least: float) -> str:
    """Return the largest number of workers that is at least so efficient."""
    efficient = [w for w in WORKERS if outcome(model, rate, course, w).efficiency >= least]
    return f"{max(efficient):,}" if efficient else "none"


def where_it_stops() -> str:
    rows = [
        [model, f"{rate} Gbit/s", *(last_with(model, rate, course, 0.5) for course in COURSES)]
        for model in MODELS
        for rate in RATES
    ]
    return table(["model", "network", *COURSES], rows)


def goodputs() -> str:
    rows = []
    for workers in (8, 1000, 10_000, ALL):
        found = survival(FAILURES, workers=workers)
        rows.append(
            [
                f"{workers:,}",
                f"{found.job_mtbf_s / HOUR_S:,.1f} h",
                f"{found.interval_s:,.0f} s",
                f"{found.young_interval_s:,.0f} s",
                f"{found.goodput:.1%}",
            ]
        )
    return table(["workers", "fails every", "best checkpoint interval", "Young's", "goodput"], rows)


def schedules() -> str:
    network = load_network("tiers-10gbe")
    links = network.links
    assert links is not None
    factors = links.factors(ALL)
    assert factors is not None
    rows = []
    for name in SCHEDULES:
        link = links.levels[1].link
        stages = stages_of("all-reduce", name, factors=factors, nbytes=MESSAGE_BYTES, link=link)
        axes = list(dict.fromkeys(stage.axis for stage in stages))
        started_s = time.perf_counter()
        seconds = simulate_classes(stages, links, ranks=ALL, nbytes=MESSAGE_BYTES)
        rows.append(
            [
                f"`{name}`",
                f"{sum(stage.alike.rounds for stage in stages):,}",
                f"{prod(classes_of(links, factors, axes)):,}",
                f"{seconds * 1e3:,.1f} ms",
                f"{time.perf_counter() - started_s:.2f} s",
            ]
        )
    return table(["all-reduce by", "rounds", "classes", "takes", "simulated in"], rows)


def draw(model: str, folder: Path) -> None:
    rows: list[charts.Row] = [
        {
            "workers": workers,
            "efficiency": outcome(model, rate, course, workers).efficiency,
            "series": course,
            "panel": f"{rate} Gbit/s a host",
        }
        for rate in RATES
        for course in COURSES
        for workers in WORKERS
    ]
    x = charts.Axis(field="workers", title="workers", log_base=10, format="~s")
    y = charts.Axis(field="efficiency", title="scaling efficiency", format="%", ends=(0.0, 1.0))
    looks = {name: course.look for name, course in COURSES.items()}
    chart = charts.lines(rows, x=x, y=y, looks=looks, size=(230, 220))
    panels = charts.in_panels(chart, [f"{rate} Gbit/s a host" for rate in RATES], columns=3)
    title = f"{model} on hosts of four GPUs, ten hosts a rack, 25 racks a pod"
    charts.finished(panels, title).save(folder / "images" / f"scale-{model}.svg")


PAGE = """# To 100,000 workers

`python benchmarks/scale.py docs` writes this page. It is computed, not measured: one step of three
shipped models on nominal networks of tiers, `tiers-1gbe`, `tiers-10gbe` and `tiers-100gbe`. A host
has four GPUs on PCIe gen3 x16; ten hosts share a rack and 25 racks a pod; a rack's uplink is half
as wide as its hosts' links together, and a pod's half as wide as its racks'. Every start-up takes
15 µs. "Ring" is one ring over everybody, blind to the tiers; "tiers" is BlueConnect, tier by tier
on ever smaller parts, with PAT's trees in every tier (`blueconnect:pat`); "both passes" has
reduce-scatters beside backward and all-gathers beside the next forward; bf16 and int8 are what
gradients are rounded to on the wire; they have four bytes otherwise, llama-1b's too. Compute times
are those of the shipped traces, which are old GPUs'; on faster GPUs efficiency falls at fewer
workers, as on a slower network.

{pictures}

## Where each stops paying

The largest number of workers, of those in the tables below, at which at least half of the time is
compute:

{stops}

The start-ups of a ring grow with the workers, so its efficiency falls first wherever messages are
many. By tiers, start-ups grow with the logarithm of each tier, and bytes do not grow at all:
efficiency is nearly level from a thousand workers on, at whatever the narrowest uplink leaves. From
there on fewer bytes are all that helps. Where bytes alone count, as on 1 Gbit/s, a ring in few
messages is ahead of tiers by up to two points from 200 workers on, until its start-ups count: to
2,000 workers for resnet50, 20,000 for bert-large and all 100,000 for llama-1b. Its links are all
busy at once, tiers take turns. The optimal planner takes the fewest messages within 1 % of the
optimum, so that DDP's many are ahead of it by less than that where start-ups are cheap.

## Efficiency

{tables}

## Failures

A worker fails once in 50,000 hours, a restart takes 300 s and a checkpoint 30 s; nobody trains
meanwhile (`gradweave simulate … --failure-hours 50000 --restart 300s --checkpoint 30s`). What is
left, with checkpoints as often as is best (Daly 2006; Young's rule of 1974 beside it):

{failures}

Multiply the efficiencies above by the goodput.

## Schedules of 100,000 ranks

An all-reduce of 100 MB on `tiers-10gbe`, simulated with clocks for one rank of each class that the
network cannot tell apart ([collectives.md](collectives.md)); seconds of simulating on two shared
cores:

{schedules}
"""


def main(folder: Path) -> None:
    for model in MODELS:
        draw(model, folder)
    pictures = "\n\n".join(
        f"![{model}: scaling efficiency over workers](images/scale-{model}.svg)" for model in MODELS
    )
    page = PAGE.format(
        pictures=pictures,
        stops=where_it_stops(),
        tables="\n\n".join(map(efficiencies, MODELS)),
        failures=goodputs(),
        schedules=schedules(),
    )
    (folder / "scale.md").write_text(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

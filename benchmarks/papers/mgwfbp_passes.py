"""What the MG-WFBP journal leaves as future work: communication beside the next forward as well."""

from functools import cache

import altair as alt

from gradweave import Trace, load_network
from gradweave._src.simulation import PAPER_WORKERS, PassesCompared, compare_passes

from . import charts
from .mgwfbp_sweep import googlenet, resnet50_by_tensor
from .page import Section, claim, ms, paragraph, picture, table, times

NETWORKS = {"10 GbE": "k80-10gbe", "1 GbE": "gtopk-1gbe"}
LOOKS = {"backward": charts.PLANNERS["optimal"], "both": charts.Look(charts.VERMILION)}
EXACT = "optimal:0"
NEGLIGIBLE = 1.005


def section() -> Section:
    name = "results-both-passes"
    return Section(
        title="Overlap with the next forward as well (not in the paper: its future work)",
        parts=[
            paragraph(INTRODUCTION),
            picture(name, "scaling efficiency over workers, overlap with backward and with both"),
            *(gains_table(network) for network in NETWORKS),
            paragraph(where_it_pays()),
            paragraph(never_worse()),
        ],
        pictures={name: chart()},
    )


INTRODUCTION = """
    Gradients are reduce-scattered beside backward, and updated parameters all-gathered in the same
    buckets beside the next forward ([both-passes.md](both-passes.md)). Both are planned exactly
    (`optimal:0`), by ring, on the authors' 10 GbE network and on the gTop-k paper's 1 GbE.
"""


@cache
def compared(model: str, network: str, workers: int) -> PassesCompared:
    found = load_network(NETWORKS[network])
    return compare_passes(traces()[model], found, workers=workers, planner=EXACT)


def traces() -> dict[str, Trace]:
    return {job.model: job.trace for job in (googlenet(), resnet50_by_tensor())}


def gains_table(network: str) -> str:
    header = [f"{network}, workers:", *(f"{workers}" for workers in PAPER_WORKERS)]
    rows = []
    for model in traces():
        every = [compared(model, network, workers) for workers in PAPER_WORKERS]
        rows += [
            [f"{model}: backward, ms", *(ms(one.backward.outcome.iteration_s) for one in every)],
            [f"{model}: both, ms", *(ms(one.both.outcome.iteration_s) for one in every)],
            [f"{model}: backward / both", *(times(one.gain) for one in every)],
        ]
    return table(header, rows)


def gaining(model: str, network: str) -> list[int]:
    return [w for w in PAPER_WORKERS if compared(model, network, w).gain > NEGLIGIBLE]


def largest_gain(network: str) -> float:
    return max(
        compared(model, network, workers).gain for model in traces() for workers in PAPER_WORKERS
    )


def where_it_pays() -> str:
    slow = gaining("ResNet-50", "1 GbE")
    return claim(
        f"""On 1 GbE messages outlast backward, and forward hides some of what it could not: up to
        {times(largest_gain("1 GbE"))}, with both models from {slow[0]} to {slow[-1]} workers.
        Beyond, start-ups decide: one message is best, and a single message overlaps with nothing,
        in either way. On 10 GbE backward alone hides nearly all that can be hidden, and both passes
        gain {times(largest_gain("10 GbE"))} at most.""",
        holds=slow == gaining("GoogLeNet", "1 GbE") == list(PAPER_WORKERS[: len(slow)])
        and compared("ResNet-50", "1 GbE", PAPER_WORKERS[len(slow)]).both.outcome.messages == 1,
    )


def never_worse() -> str:
    return claim(
        """Here both passes are never the slower. That is no law, even where an all-reduce costs
        what its halves do: a long backward can hide an all-reduce whole, and a short forward not
        half of it. both-passes.md says when it is one.""",
        holds=all(
            compared(model, network, workers).gain > 1 - 1e-9
            for model in traces()
            for network in NETWORKS
            for workers in PAPER_WORKERS
        ),
    )


def chart() -> alt.TopLevelMixin:
    panels = [f"{model}, {network}" for network in NETWORKS for model in traces()]
    rows: list[charts.Row] = []
    for network in NETWORKS:
        for model in traces():
            for workers in PAPER_WORKERS:
                found = compared(model, network, workers)
                for series, one in (("backward", found.backward), ("both", found.both)):
                    rows.append(
                        {
                            "panel": f"{model}, {network}",
                            "series": series,
                            "workers": workers,
                            "efficiency": one.outcome.efficiency,
                        }
                    )
    axis = charts.workers_axis(PAPER_WORKERS)
    drawn = charts.lines(rows, x=axis, y=charts.EFFICIENCY, looks=LOOKS, size=(290, 180))
    title = "Where messages outlast backward, the next forward hides more of them"
    return charts.finished(charts.in_panels(drawn, panels, columns=2), title)

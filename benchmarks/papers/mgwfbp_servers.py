"""MG-WFBP, journal Figs. 6 and 7: the bars of parameter servers, measured in the lab."""

from functools import cache
from statistics import mean

from intervals import paired_ratios, with_interval

from . import measured
from .mgwfbp_nodes import MODELS
from .page import Section, claim, differences, paragraph, table

NATIVE, ONE, FOUR = "native", "parameter-server", "parameter-server:4"
COLLECTIVES = {NATIVE: "all-reduce (gloo)", ONE: "one server", FOUR: "four servers"}
PLANNERS = ("wfbp", "optimal")


@cache
def lab() -> dict[str, dict[str, measured.Row]]:
    """Return the runtimes that were measured, by trace."""
    return {one.results[0].trace: one.rows for one in measured.training("servers")}


def row(model: str, planner: str, collective: str) -> measured.Row:
    return lab()[MODELS[model]][f"{planner}@{collective}"]


def over_native(model: str, planner: str, collective: str) -> list[float]:
    """Return how many times as long it takes as by all-reduces, repeat by repeat."""
    return paired_ratios(
        row(model, planner, collective).repeats_s, row(model, planner, NATIVE).repeats_s
    )


def section() -> Section:
    return Section(
        title="Parameter servers, measured in the lab (journal Figs. 6 and 7)",
        parts=[
            paragraph(how_to_read()),
            servers_table(),
            differences([one_port(), no_bars()]),
        ],
        pictures={},
    )


def how_to_read() -> str:
    repeats = len(row("ResNet-50", "wfbp", NATIVE).repeats_s)
    return f"""
        Four emulated nodes at 1 Gbit/s, an eighth of the parameters, forward 0.1 s and backward
        0.2 s ({measured.page_of("training")}). All gradients are pushed to one rank, or each
        message in four parts to all of them, and pulled; `optimal` plans for what that was measured
        to cost. Ratios are of two iterations in the same repeat: mean and 95 % interval over
        {repeats} repeats.
    """


def servers_table() -> str:
    header = ["model", "planner", "sent by", "messages", "iteration, ms", "predicted, ms"]
    header.append("its time over the all-reduce's")
    rows = []
    for model in MODELS:
        for planner in PLANNERS:
            for collective, name in COLLECTIVES.items():
                found = row(model, planner, collective)
                rows.append(
                    [
                        model,
                        f"`{planner}`",
                        name,
                        f"{found.messages}",
                        f"{found.iteration_s * 1e3:,.0f}",
                        f"{found.predicted_s * 1e3:,.0f}",
                        with_interval(over_native(model, planner, collective), digits=2),
                    ]
                )
    return table(header, rows)


def one_port() -> str:
    slower, spread = (
        [mean(over_native(model, "optimal", servers)) for model in MODELS]
        for servers in (ONE, FOUR)
    )
    return claim(
        f"""The papers find TensorFlow's servers behind all-reduces. So it is here, and for their
        reason: with the best merging for each, one server takes {min(slower):.2f} and
        {max(slower):.2f} times as long as all-reduces, because everybody's gradients go through one
        port; four servers, as many as there are nodes, have the bytes of a ring and take
        {min(spread):.2f} and {max(spread):.2f} times as long. One message for each gradient
        (`wfbp`) costs start-ups by any way, and hides the difference.""",
        holds=min(slower) > 1.2 and max(spread) < 1.2,
    )


def no_bars() -> str:
    return """The papers' bars are pictures without numbers, of TensorFlow on one or two K80 in each
        node, so only the order can be compared: which of TensorFlow's own costs are in them is not
        explained."""

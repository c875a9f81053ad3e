"""MG-WFBP journal, 6.4: how many messages Algorithm 1 sends, for 4 to 2048 workers by ring."""

from collections.abc import Sequence

import altair as alt

from gradweave._src.simulation import PAPER_WORKERS

from . import charts
from .mgwfbp_sweep import by, googlenet_adding
from .page import Section, claim, differences, listed, paragraph, picture, table

# Journal 6.4: n "merged-gradient layers" for 4, 8, ... 2048 workers.
PAPER_COUNTS = {
    "GoogLeNet": (10, 6, 6, 5, 3, 2, 1, 1, 1, 1),
    "ResNet-50": (33, 19, 10, 7, 5, 3, 1, 1, 1, 1),
}

LOOKS = {
    "paper": charts.Look(charts.BLACK),
    "mgwfbp": charts.PLANNERS["mgwfbp"],
    "mgwfbp, with the authors' time to add": charts.Look(charts.SKY, charts.DASHED),
    "optimal": charts.PLANNERS["optimal"],
}


def section() -> Section:
    return Section(
        title="How many messages MG-WFBP sends (journal, text of 6.4)",
        parts=[
            picture("results-messages", "messages per iteration over workers, by ring"),
            googlenet_table(),
            resnet_table(),
            paragraph(what_n_counts()),
            differences([googlenet_difference(), resnet_difference()]),
        ],
        pictures={"results-messages": chart()},
    )


def googlenet_table() -> str:
    google, adding = by("ring")[0], googlenet_adding()
    return counts_table(
        f"{google.job.label} (measured)",
        {
            "paper: n": PAPER_COUNTS["GoogLeNet"],
            "`mgwfbp`: messages": google.messages("mgwfbp"),
            "`mgwfbp`: messages of several layers": google.merged_messages("mgwfbp"),
            "with the authors' time to add: messages": adding.messages("mgwfbp"),
            "with the authors' time to add: of several layers": adding.merged_messages("mgwfbp"),
            "`optimal`: messages": google.messages("optimal"),
            "`optimal:0`: messages": google.messages("optimal:0"),
        },
    )


def resnet_table() -> str:
    tensors = by("ring")[1]
    return counts_table(
        f"{tensors.job.label} (estimated)",
        {
            "paper: n": PAPER_COUNTS["ResNet-50"],
            "`mgwfbp`: messages": tensors.messages("mgwfbp"),
            "`optimal`: messages": tensors.messages("optimal"),
            "`optimal:0`: messages": tensors.messages("optimal:0"),
        },
    )


def counts_table(title: str, counts: dict[str, tuple[int, ...]]) -> str:
    header = [f"{title}, workers:", *(f"{workers}" for workers in PAPER_WORKERS)]
    return table(header, [[name, *map(str, found)] for name, found in counts.items()])


def agreeing(paper: Sequence[int], ours: Sequence[int]) -> list[int]:
    """Return the numbers of workers at which both count alike."""
    return [w for w, p, o in zip(PAPER_WORKERS, paper, ours, strict=True) if p == o]


def what_n_counts() -> str:
    adding, paper = googlenet_adding(), PAPER_COUNTS["GoogLeNet"]
    alike = agreeing(paper, adding.messages("mgwfbp"))
    of_several = agreeing(paper, adding.merged_messages("mgwfbp"))
    return claim(
        f"""The paper calls n the number of "merged-gradient layers". It is the number of messages:
        with the authors' time to add, a faithful Algorithm 1 on their trace sends exactly n at
        {listed(alike)} workers and misses it by one at the other
        ({adding.messages("mgwfbp")[0]} for {paper[0]}); counting only messages of several layers
        agrees at {len(of_several)} of {len(PAPER_WORKERS)}.""",
        holds=alike == list(PAPER_WORKERS[1:])
        and adding.messages("mgwfbp")[0] == paper[0] + 1
        and len(of_several) < len(alike),
    )


def googlenet_difference() -> str:
    google, paper = by("ring")[0], PAPER_COUNTS["GoogLeNet"]
    alike = agreeing(paper, google.messages("mgwfbp"))
    return claim(
        f"""GoogLeNet: on the shipped network `k80-10gbe`, which leaves the time to add out, the
        counts agree at {listed(alike)} workers and ours are higher below: messages are shorter
        there, so fewer gradients find the network busy.""",
        holds=all(
            ours >= theirs for ours, theirs in zip(google.messages("mgwfbp"), paper, strict=True)
        ),
    )


def resnet_difference() -> str:
    tensors, layers = by("ring")[1:]
    ours = tensors.messages("mgwfbp")
    alike = agreeing(PAPER_COUNTS["ResNet-50"], ours)
    return claim(
        f"""ResNet-50: equal only at {listed(alike)} workers. The count hangs on when each single
        gradient is ready, and our trace is estimated. What counts as a layer does not matter here:
        {tensors.job.layers} or {layers.job.layers}, the messages are the same.""",
        holds=ours == layers.messages("mgwfbp"),
    )


def chart() -> alt.TopLevelMixin:
    google, tensors = by("ring")[:2]
    series = {
        ("GoogLeNet", "paper"): PAPER_COUNTS["GoogLeNet"],
        ("GoogLeNet", "mgwfbp"): google.messages("mgwfbp"),
        ("GoogLeNet", "mgwfbp, with the authors' time to add"): googlenet_adding().messages(
            "mgwfbp"
        ),
        ("GoogLeNet", "optimal"): google.messages("optimal"),
        ("ResNet-50", "paper"): PAPER_COUNTS["ResNet-50"],
        ("ResNet-50", "mgwfbp"): tensors.messages("mgwfbp"),
        ("ResNet-50", "optimal"): tensors.messages("optimal"),
    }
    rows: list[charts.Row] = [
        {"panel": model, "series": name, "workers": workers, "messages": count}
        for (model, name), found in series.items()
        for workers, count in zip(PAPER_WORKERS, found, strict=True)
    ]
    messages = charts.Axis(
        field="messages", title="messages", log_base=2, format="d", ticks=(1, 2, 4, 8, 16, 32)
    )
    lines = charts.lines(
        rows, x=charts.workers_axis(PAPER_WORKERS), y=messages, looks=LOOKS, size=(290, 200)
    )
    panels = charts.in_panels(lines, ["GoogLeNet", "ResNet-50"], columns=2)
    most = max(*google.messages("optimal"), *tensors.messages("optimal"))
    return charts.finished(panels, f"Messages per iteration: optimal never needs more than {most}")

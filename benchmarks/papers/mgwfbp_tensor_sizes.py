"""MG-WFBP journal, Fig. 5: the tensor sizes of six models over what sending them costs."""

from collections import Counter

import altair as alt
import numpy as np

from gradweave import Trace, load_trace
from gradweave._src.costs import Line

from . import charts
from .mgwfbp_clusters import MODELS, WORKERS, clusters
from .page import Section, claim, differences, paragraph, picture, table, whole_percent

# Journal, Table 4, without GoogLeNet, whose trace is by layer.
PAPER_TENSORS = {
    "ResNet-50": 161,
    "ResNet-152": 467,
    "DenseNet-161": 484,
    "DenseNet-201": 604,
    "Inception-v4": 449,
}
# Journal 6.2: "ResNet-152 has 150 tensors whose size is 1024 bytes", "DenseNet-161 has 160 tensors
# whose size is 768 bytes".
PAPER_SIZES = {"ResNet-152": (1024, 150), "DenseNet-161": (768, 160)}

MODEL_LOOKS = {
    model: charts.Look(colour)
    for model, colour in zip(
        MODELS,
        (
            charts.BLACK,
            charts.ORANGE,
            charts.VERMILION,
            charts.SKY,
            charts.BLUE,
            charts.GREEN,
        ),
        strict=True,
    )
}
CLUSTER_LOOKS = {
    "cluster 1": charts.Look(charts.BLACK),
    "cluster 2": charts.Look(charts.BLUE, charts.DASHED),
    "cluster 3": charts.Look(charts.GREEN, charts.DOTTED),
}
SMALLEST_BYTES, LARGEST_BYTES = 100, 20e6
BYTES = charts.Axis(
    field="nbytes",
    title="bytes of one tensor",
    log_base=10,
    format="~s",
    ticks=(1e2, 1e3, 1e4, 1e5, 1e6, 1e7),
    ends=(SMALLEST_BYTES, LARGEST_BYTES),
)


def section() -> Section:
    return Section(
        title="Tensor sizes over the cost of an all-reduce (journal Fig. 5)",
        parts=[
            picture("results-tensor-sizes", "tensor sizes above the cost of sending them"),
            paragraph(how_to_read()),
            sizes_table(),
            differences([counts_difference(), curves_difference()]),
        ],
        pictures={"results-tensor-sizes": chart()},
    )


def traces() -> dict[str, Trace]:
    return {model: load_trace(preset) for model, preset in MODELS.items()}


def all_reduce_lines() -> dict[str, Line]:
    """Return the journal's fits of Fig. 4, by cluster."""
    lines = {}
    for cluster in clusters():
        network = cluster.network
        cost = network.cost("all-reduce", network.default_collective, workers=WORKERS)
        lines[cluster.name] = cost.line(1e8)
    return lines


def startup_shares(trace: Trace) -> list[float]:
    """Return for each cluster the share of tensors whose start-up exceeds their transfer."""
    lines = all_reduce_lines().values()
    return [float((trace.nbytes * line.s_per_byte < line.startup_s).mean()) for line in lines]


def least_share() -> float:
    return min(share for trace in traces().values() for share in startup_shares(trace))


def how_to_read() -> str:
    sizes = {name: line.startup_s / line.s_per_byte for name, line in all_reduce_lines().items()}
    listing = ", ".join(f"{nbytes / 1e6:.2f} MB on {name}" for name, nbytes in sizes.items())
    return f"""
        A message below a certain size costs more in start-up than in transfer: {listing}. At least
        {whole_percent(least_share())} of the tensors of every model are smaller. Sizes are
        exact, for 4-byte gradients; in the GoogLeNet trace, weight and bias of a layer are one.
    """


def sizes_table() -> str:
    header = ["model", "tensors", "median size", "most frequent size"]
    header += [f"start-up exceeds transfer, {name}" for name in all_reduce_lines()]
    return table(header, [sizes_row(model, trace) for model, trace in traces().items()])


def sizes_row(model: str, trace: Trace) -> list[str]:
    size, count = Counter(tensor.nbytes for tensor in trace.tensors).most_common(1)[0]
    return [
        model,
        f"{len(trace.tensors)}",
        f"{np.median(trace.nbytes):,.0f} B",
        f"{size:,} B ({count} tensors)",
        *(whole_percent(share) for share in startup_shares(trace)),
    ]


def counts_difference() -> str:
    found = traces()
    ours = {
        model: sum(tensor.nbytes == size for tensor in found[model].tensors)
        for model, (size, _) in PAPER_SIZES.items()
    }
    listing = "; ".join(
        f"{model} has {ours[model]} tensors of {size} bytes (paper: {count})"
        for model, (size, count) in PAPER_SIZES.items()
    )
    return claim(
        f"""{listing}. The models are the same, tensor for tensor: all counts but GoogLeNet's are
        those of the journal's Table 4.""",
        holds=all(abs(ours[model] - count) <= 2 for model, (_, count) in PAPER_SIZES.items())
        and all(len(found[model].tensors) == count for model, count in PAPER_TENSORS.items()),
    )


def curves_difference() -> str:
    return """The paper's figure has two cost curves and does not name them; we draw all three
        clusters, from the lines of its Fig. 4."""


def chart() -> alt.TopLevelMixin:
    """Draw two panels over the same bytes: how many tensors there are, and what they cost."""
    both: alt.VConcatChart = alt.vconcat(frequency_chart(), cost_chart(), spacing=4)
    independent = both.resolve_scale(
        color="independent", shape="independent", strokeDash="independent"
    )
    title = claim("Most tensors cost more in start-up than in transfer", holds=least_share() > 0.5)
    return charts.finished(independent, title)


def frequency_chart() -> alt.Chart:
    rows: list[charts.Row] = [
        {"series": model, "nbytes": size, "tensors": count}
        for model, trace in traces().items()
        for size, count in sorted(Counter(tensor.nbytes for tensor in trace.tensors).items())
    ]
    count = charts.Axis(
        field="tensors", title="tensors of this size", log_base=10, ticks=(1, 3, 10, 30, 100)
    )
    legend = alt.Legend(title=None)
    frequency: alt.Chart = (
        charts.data_chart(rows)
        .mark_point(filled=True, size=26, opacity=0.75)
        .encode(
            x=BYTES.x(),
            y=count.y(),
            color=charts.colour(MODEL_LOOKS, legend),
            shape=alt.Shape("series:N", scale=alt.Scale(domain=list(MODEL_LOOKS)), legend=legend),
        )
        .properties(width=620, height=180)
    )
    return frequency


def cost_chart() -> alt.Chart:
    sizes = np.geomspace(SMALLEST_BYTES, LARGEST_BYTES, 41)
    rows: list[charts.Row] = [
        {
            "series": name,
            "nbytes": float(size),
            "ms": (line.startup_s + line.s_per_byte * size) * 1e3,
        }
        for name, line in all_reduce_lines().items()
        for size in sizes
    ]
    cost = charts.Axis(field="ms", title="all-reduce, ms", log_base=10, ticks=(0.3, 1, 3, 10, 30))
    return charts.lines(rows, x=BYTES, y=cost, looks=CLUSTER_LOOKS, size=(620, 110), points=False)

"""gTop-k, Table VII: images per second on 32 GPUs, and what the cost model leaves out."""

import altair as alt

from . import charts
from .gtopk_exchange import DENSITY, METHODS, Method, exchange_s
from .gtopk_models import LARGEST, MB, MODELS, PCIE_BYTES_PER_S, Model
from .page import Highlight, Section, claim, differences, paragraph, picture, table, times

# The end of VGG-16: three fully connected layers, which the paper's 4.E says it has, or our one.
THREE_LAYERS_PARAMETERS = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
ONE_LAYER_PARAMETERS = 512 * 10 + 10
TORCHVISION_ALEXNET_PARAMETERS = 61_100_840


def section() -> Section:
    name = "results-gtopk-throughput"
    return Section(
        title="Images per second on 32 GPUs (its Table VII)",
        parts=[
            picture(name, "images per second, model and paper"),
            throughput_table(),
            paragraph(how_to_read_missing()),
            missing_table(),
            differences(reasons()),
        ],
        pictures={name: throughput_chart()},
        highlights=highlights(),
    )


def throughput_table() -> str:
    header = [""]
    for method in METHODS:
        header += [f"{method}, model", "paper"]
    header += ["gTop-k / dense, model", "paper", "gTop-k / top-k, model", "paper"]
    return table(header, [throughput_row(model) for model in MODELS])


def throughput_row(model: Model) -> list[str]:
    row = [f"{model.name} ({model.gradient_bytes / MB:.1f} MB)"]
    for method in METHODS:
        row += [f"{model.images_per_s(method):,.0f}", f"{model.paper_images(method):,}"]
    for other, printed in zip(METHODS[:2], model.paper_ratios, strict=True):
        row += [times(model.images_per_s("gTop-k") / model.images_per_s(other)), printed]
    return row


def how_to_read_missing() -> str:
    return f"""
        What the model lacks, in seconds per iteration. The paper's iteration is 32 batches over its
        images per second. Of that, its Table VI gives the computing, the model the network, and its
        Table III, one lane of PCI Express at {PCIE_BYTES_PER_S / MB:g} MB/s, the least time for
        copying what travels out of the GPU and back. The rest has no number in the paper.
    """


def missing_table() -> str:
    header = ["", "paper's iteration", "computing", "network (model)", "PCIe copies", "rest"]
    header.append("rest, ms per MB of gradients")
    return table(header, [missing_row(model, method) for method in METHODS for model in MODELS])


def missing_row(model: Model, method: Method) -> list[str]:
    seconds = (
        model.paper_iteration_s(method),
        model.compute_s,
        model.exchange_s(method, LARGEST),
        model.copied_s(method),
        model.unexplained_s(method),
    )
    row = [f"{model.name}, {method}", *(f"{value:.3f}" for value in seconds)]
    return [*row, f"{model.unexplained_s_per_mb(method) * 1e3:.0f}"]


def spread_ms_per_mb(method: Method) -> tuple[float, float]:
    found = [model.unexplained_s_per_mb(method) * 1e3 for model in MODELS]
    return min(found), max(found)


def reasons() -> list[str]:
    return [dense_rest(), sparse_rest(), start_ups(), vgg_head(), alexnet_size()]


def dense_rest() -> str:
    low, high = spread_ms_per_mb("dense")
    wire = min(m.exchange_s("dense", LARGEST) / m.gradient_bytes * MB * 1e3 for m in MODELS)
    return claim(
        f"""Dense: the rest is {low:.0f} to {high:.0f} ms for each MB of gradients, much the same
        for models whose sizes lie {size_range():.0f}x apart. The ring takes {wire:.0f} ms per MB on
        1 GbE, so a cost per byte is missing, {low / wire:.0f} to {high / wire:.0f} times the
        wire's, rather than a start-up. Candidates in Table III: a Celeron N3350 that has to move
        every byte through its TCP stack, the one lane of PCI Express that NCCL's traffic crosses
        again and again, 4 GB of memory with a swap file. The paper gives none of them a time.""",
        holds=high < 2 * low and low > 5 * wire,
    )


def size_range() -> float:
    sizes = [model.gradient_bytes for model in MODELS]
    return max(sizes) / min(sizes)


def sparse_rest() -> str:
    topk, gtopk = spread_ms_per_mb("top-k"), spread_ms_per_mb("gTop-k")
    return claim(
        f"""Sparse: the rest is {topk[0]:.0f} to {topk[1]:.0f} ms (top-k) and {gtopk[0]:.0f} to
        {gtopk[1]:.0f} ms (gTop-k) per MB of *dense* gradients, of which one in
        {1 / DENSITY:.0f} travels. So what is missing is work over all gradients: the selection,
        which the paper calls "comparable to the computation time" on VGG-16 and AlexNet, the
        residuals, and for top-k the sum of {LARGEST} sparse vectors.""",
        holds=topk[1] < 2.5 * topk[0] and gtopk[1] < 2.5 * gtopk[0] and gtopk[1] < topk[0],
    )


def start_ups() -> str:
    behind = [m.name for m in MODELS if m.images_per_s("gTop-k") < m.images_per_s("top-k")]
    return claim(
        f"""{" and ".join(behind)}: by the model top-k is slightly ahead of gTop-k. Its gradients
        are so small that start-ups decide, and gTop-k goes up the tree and down again. Measured,
        gTop-k is ahead.""",
        holds=behind == ["ResNet-20"]
        and all(m.paper_images("gTop-k") > m.paper_images("top-k") for m in MODELS),
    )


def vgg_head() -> str:
    vgg = named("VGG-16")
    larger = vgg.parameters - ONE_LAYER_PARAMETERS + THREE_LAYERS_PARAMETERS
    return f"""VGG-16: the paper prints no size. Ours is the usual one for CIFAR-10 with one linear
        layer, {vgg.parameters / 1e6:.1f} M parameters. The paper mentions three fully connected
        layers; of width 4096 they would make it {larger / 1e6:.1f} M, and
        {dense_images_with(vgg, larger):,.0f} images/s dense by the model instead of
        {vgg.images_per_s("dense"):,.0f}; measured are {vgg.paper_images("dense")}."""


def alexnet_size() -> str:
    alexnet = named("AlexNet")
    other = TORCHVISION_ALEXNET_PARAMETERS
    return f"""AlexNet: {alexnet.parameters / 1e6:.1f} M parameters here, pytorchcv's. torchvision's
        has {other / 1e6:.1f} M, which would make {dense_images_with(alexnet, other):,.0f} images/s
        dense instead of {alexnet.images_per_s("dense"):,.0f}."""


def named(name: str) -> Model:
    return next(model for model in MODELS if model.name == name)


def dense_images_with(model: Model, parameters: int) -> float:
    """Return the images per second if the model had so many parameters."""
    sent_s = exchange_s("dense", nbytes=4 * parameters, workers=LARGEST)
    return LARGEST * model.batch / (model.compute_s + sent_s)


def throughput_chart() -> alt.TopLevelMixin:
    sources = {"model": charts.Look(charts.SKY), "measured by the paper": charts.Look(charts.BLACK)}
    rows: list[charts.Row] = [
        {"panel": model.name, "method": method, "series": source, "images": images}
        for model in MODELS
        for method in METHODS
        for source, images in zip(
            sources, (model.images_per_s(method), model.paper_images(method)), strict=True
        )
    ]
    images = charts.Axis(
        field="images",
        title="images/s",
        log_base=10,
        ticks=(10, 100, 1000, 10000),
        ends=(10, 100000),
        format="~s",
    )
    bars: alt.Chart = (
        charts.data_chart(rows)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(
            x=images.x(),
            y=alt.Y("method:N", sort=list(METHODS), title=None),
            color=charts.colour(sources, alt.Legend(title=None, symbolOpacity=1)),
            shape=alt.Shape("series:N", scale=alt.Scale(domain=list(sources)), legend=None),
        )
        .properties(width=280, height=70)
    )
    panels = charts.in_panels(bars, [model.name for model in MODELS], columns=2)
    title = claim(
        "The cost model alone promises more images/s than were measured, everywhere",
        holds=all(m.images_per_s(x) > m.paper_images(x) for m in MODELS for x in METHODS),
    )
    return charts.finished(panels, title)


def highlights() -> list[Highlight]:
    return [
        Highlight(
            what=f"32 GPUs, {model.name} (gTop-k Table VII): images/s dense / top-k / gTop-k",
            paper=" / ".join(f"{model.paper_images(x):,}" for x in METHODS) + " (measured)",
            ours=" / ".join(f"{model.images_per_s(x):,.0f}" for x in METHODS),
        )
        for model in MODELS
    ]

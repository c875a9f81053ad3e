"""gTop-k, Fig. 9: dense, top-k and gTop-k exchange over workers and over message size."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import altair as alt
import numpy as np

from gradweave import Compression, Network, load_network

from . import charts
from .page import Section, claim, differences, ms, paragraph, picture, table

Method = Literal["dense", "top-k", "gTop-k"]

# gTop-k 4.C: 100 MB, density 0.001.
DENSITY = 0.001
MESSAGE_BYTES = 100e6
COMPRESSIONS: Mapping[Method, Compression | None] = {
    "dense": None,
    "top-k": Compression(method="topk", density=DENSITY),
    "gTop-k": Compression(method="gtopk-tree", density=DENSITY),
}
METHODS = tuple(COMPRESSIONS)
LOOKS = {
    "dense": charts.Look(charts.ORANGE),
    "top-k": charts.Look(charts.PURPLE, charts.DASHED),
    "gTop-k": charts.Look(charts.BLUE),
}

WORKERS = (4, 8, 16, 32, 64, 128)
SIZES = (1e6, 2e6, 5e6, 10e6, 20e6, 50e6, 100e6)
# gTop-k, Fig. 9, right: 32 workers by its caption, 64 by the text of 4.C.
CAPTION_WORKERS, TEXT_WORKERS = 32, 64


@cache
def cluster() -> Network:
    return load_network("gtopk-1gbe")


def exchange_s(method: Method, *, nbytes: float, workers: int) -> float:
    compression = COMPRESSIONS[method]
    cost = cluster().cost("all-reduce", "ring", workers=workers, compression=compression)
    return float(cost.seconds(np.array([nbytes]))[0])


def section() -> Section:
    return Section(
        title="Exchange time over workers and message size (its Fig. 9)",
        parts=[
            picture("results-gtopk-exchange", "exchange time over workers and over message size"),
            workers_table(),
            sizes_table(),
            paragraph(overtaking()),
            differences([inconsistent_caption()]),
        ],
        pictures={"results-gtopk-exchange": chart()},
    )


def workers_table() -> str:
    header = [f"{MESSAGE_BYTES / 1e6:g} MB, ms", *(f"{workers} workers" for workers in WORKERS)]
    rows = [
        [method, *(ms(exchange_s(method, nbytes=MESSAGE_BYTES, workers=w)) for w in WORKERS)]
        for method in METHODS
    ]
    return table(header, rows)


def sizes_table() -> str:
    header = ["ms", *(f"{size / 1e6:g} MB" for size in SIZES)]
    rows = [
        [f"{method}, {w} workers", *(ms(exchange_s(method, nbytes=s, workers=w)) for s in SIZES)]
        for w in (CAPTION_WORKERS, TEXT_WORKERS)
        for method in METHODS
    ]
    return table(header, rows)


def ahead_from(nbytes: float) -> int:
    """Return the first number of workers at which gTop-k is faster than top-k."""
    return next(workers for workers in WORKERS if advantage(nbytes, workers) > 1)


def advantage(nbytes: float, workers: int) -> float:
    """Return the time of top-k over that of gTop-k."""
    topk_s, gtopk_s = (exchange_s(method, nbytes=nbytes, workers=workers) for method in METHODS[1:])
    return topk_s / gtopk_s


def overtaking() -> str:
    first, low, high = ahead_from(MESSAGE_BYTES), WORKERS[0], CAPTION_WORKERS
    at_few, at_many = (advantage(MESSAGE_BYTES, workers) for workers in (low, high))
    smallest, largest = (advantage(size, CAPTION_WORKERS) for size in (SIZES[0], SIZES[-1]))
    return claim(
        f"""As in the paper, with few workers top-k is faster, by {1 / at_few:.1f}x at {low}; gTop-k
        from {first} on, by {at_many:.1f}x at {high}. At {high} workers the time of top-k over that
        of gTop-k grows with the message, from {smallest:.1f} at {SIZES[0] / 1e6:g} MB to
        {largest:.1f} at {SIZES[-1] / 1e6:g} MB.""",
        holds=at_few < 1 < at_many and low < first < high and smallest < largest,
    )


def inconsistent_caption() -> str:
    return f"""Nothing: both are the same formulas, and the paper prints no numbers to compare. For
        the message sizes its caption says {CAPTION_WORKERS} workers and its text {TEXT_WORKERS};
        the table has both, the picture the caption's."""


def chart() -> alt.TopLevelMixin:
    panels = (
        f"{MESSAGE_BYTES / 1e6:g} MB, over workers",
        f"{CAPTION_WORKERS} workers, over MB",
    )
    time = charts.Axis(
        field="ms", title="exchange, ms", log_base=10, ticks=(1, 10, 100, 1000), ends=(3, 3000)
    )
    by_workers: list[charts.Row] = [
        {
            "series": method,
            "workers": workers,
            "ms": exchange_s(method, nbytes=MESSAGE_BYTES, workers=workers) * 1e3,
        }
        for method in METHODS
        for workers in WORKERS
    ]
    by_size: list[charts.Row] = [
        {
            "series": method,
            "size": size / 1e6,
            "ms": exchange_s(method, nbytes=size, workers=CAPTION_WORKERS) * 1e3,
        }
        for method in METHODS
        for size in SIZES
    ]
    megabytes = charts.Axis(
        field="size", title=panels[1], log_base=10, ticks=[size / 1e6 for size in SIZES]
    )
    workers = charts.workers_axis(WORKERS, panels[0])
    both = alt.hconcat(
        charts.lines(by_workers, x=workers, y=time, looks=LOOKS, size=(280, 210)),
        charts.lines(by_size, x=megabytes, y=time, looks=LOOKS, size=(280, 210)),
    )
    least = min(
        exchange_s("dense", nbytes=MESSAGE_BYTES, workers=w)
        / exchange_s("top-k", nbytes=MESSAGE_BYTES, workers=w)
        for w in WORKERS
    )
    title = claim(
        "Sparse exchange is far below dense, and gTop-k grows slowly with the workers",
        holds=least > 5 and growth("gTop-k") < 4 < growth("top-k"),
    )
    return charts.finished(both, title)


def growth(method: Method) -> float:
    """Return how many times as long an exchange takes with the most as with the least workers."""
    first_s, last_s = (
        exchange_s(method, nbytes=MESSAGE_BYTES, workers=w) for w in (WORKERS[0], WORKERS[-1])
    )
    return last_s / first_s

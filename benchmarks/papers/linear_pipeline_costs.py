"""Linear Pipeline, Table 1: what broadcast, reduce and all-reduce cost, by three algorithms."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gradweave import Network
from gradweave._src.costs import Link, flat
from gradweave._src.costs.pipeline import (
    PipelineCost,
    pipeline_all_reduce,
    pipeline_broadcast,
    pipeline_reduce,
)
from gradweave._src.vocabulary import Operation

from . import charts

# Linear Pipeline 3.2: PCI Express x16 has a latency of "10^-7 s", a rate of about 10^9 bytes per
# second, and adding takes no time.
LINK = Link(latency_s=1e-7, s_per_byte=1e-9)
NETWORK = Network(name="pcie", source="Linear Pipeline paper, 3.2", links=flat(LINK))

PIPELINES: Mapping[Operation, Callable[[Link, int], PipelineCost]] = {
    "broadcast": pipeline_broadcast,
    "reduce": pipeline_reduce,
    "all-reduce": pipeline_all_reduce,
}
OPERATIONS: Sequence[Operation] = tuple(PIPELINES)
# Linear Pipeline 3.2: "we set the block size b around 64 KB".
PAPER_BLOCK = "64KB"
COLLECTIVES = ("linear-pipeline", f"linear-pipeline:{PAPER_BLOCK}", "mst", "exchange")
LOOKS = {
    "linear-pipeline": charts.Look(charts.BLUE),
    "mst": charts.Look(charts.ORANGE, charts.DASHED),
    "exchange": charts.Look(charts.GREEN, charts.DOTTED),
}

SIZES = (64e3, 256e3, 1e6, 4e6, 16e6, 64e6)
WORKERS = (2, 3, 4, 5, 6, 7, 8)
# Linear Pipeline, Fig. 3: measured on four K40m.
SIZE_WORKERS = 4
WORKER_BYTES = SIZES[-1]


def seconds(operation: Operation, collective: str, *, nbytes: float, workers: int) -> float:
    return NETWORK.seconds(operation, collective, nbytes=nbytes, workers=workers)


def over(operation: Operation, collective: str, *, nbytes: float, workers: int) -> float:
    """Return the other's time over that of the pipeline with its best block."""
    pipeline_s = seconds(operation, "linear-pipeline", nbytes=nbytes, workers=workers)
    return seconds(operation, collective, nbytes=nbytes, workers=workers) / pipeline_s


def block_bytes(operation: Operation, *, nbytes: float, workers: int) -> float:
    return nbytes / float(PIPELINES[operation](LINK, workers).blocks(np.array([nbytes]))[0])


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:g} KB"

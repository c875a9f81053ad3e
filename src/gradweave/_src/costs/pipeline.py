"""Linear pipeline, minimum spanning tree and bidirectional exchange: the Linear Pipeline paper's
Table 1, for broadcast, reduce and all-reduce.
"""

from dataclasses import dataclass

import numpy as np

from gradweave._src.costs.all_reduce import halving_doubling
from gradweave._src.costs.cost import Fitting, FloatArray, Line, fit_line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import rounds


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Blocks of b bytes that pass along a chain of p workers: (p-1 + n/b) steps in each pass.

    With ``s_per_byte`` summed over the passes, the message of n bytes takes

        T(b) = passes * (p-1 + n/b) * alpha + (b (p-1) + n) * s_per_byte,

    which is least at b* = sqrt(n * passes * alpha / ((p-1) * s_per_byte)), where the time that more
    blocks cost in start-ups equals the time that a larger block costs in filling the pipe.
    A block is never larger than the message.
    """

    workers: int
    latency_s: float
    s_per_byte: float
    passes: int
    fixed_block_bytes: int | None = None

    def block_bytes(self, nbytes: FloatArray) -> FloatArray:
        if self.fixed_block_bytes is not None:
            return np.minimum(nbytes, float(self.fixed_block_bytes))
        filling = (self.workers - 1) * self.s_per_byte
        if filling == 0:
            return nbytes
        return np.clip(np.sqrt(nbytes * self.passes * self.latency_s / filling), 1.0, nbytes)

    def seconds(self, nbytes: FloatArray) -> FloatArray:
        block = self.block_bytes(nbytes)
        steps = self.passes * (self.workers - 1 + nbytes / block)
        return steps * self.latency_s + (block * (self.workers - 1) + nbytes) * self.s_per_byte

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        sizes = np.geomspace(min(1024.0, largest_bytes / 2), largest_bytes, 64)
        return fitted(sizes, self.seconds(sizes))

    @property
    def known_to_bytes(self) -> float:
        return np.inf


def pipeline_broadcast(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    return PipelineCost(workers, link.latency_s, link.s_per_byte, 1, block_bytes)


def pipeline_reduce(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    per_byte = link.s_per_byte + link.sum_s_per_byte
    return PipelineCost(workers, link.latency_s, per_byte, 1, block_bytes)


def pipeline_all_reduce(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    """A reduce, then a broadcast. (The fused form of the paper's Fig. 2 fills the pipe once.)"""
    per_byte = 2 * link.s_per_byte + link.sum_s_per_byte
    return PipelineCost(workers, link.latency_s, per_byte, 2, block_bytes)


def mst_broadcast(link: Link, workers: int) -> Line:
    return _each_round(workers, link.latency_s, link.s_per_byte)


def mst_reduce(link: Link, workers: int) -> Line:
    return _each_round(workers, link.latency_s, link.s_per_byte + link.sum_s_per_byte)


def mst_all_reduce(link: Link, workers: int) -> Line:
    return mst_reduce(link, workers).plus(mst_broadcast(link, workers))


def exchange_broadcast(link: Link, workers: int) -> Line:
    """A scatter down the tree, then an all-gather around the ring."""
    return Line(
        startup_s=(rounds(workers) + workers - 1) * link.latency_s,
        s_per_byte=2 * (workers - 1) / workers * link.s_per_byte,
    )


def exchange_reduce(link: Link, workers: int) -> Line:
    """A reduce-scatter by halving, then a gather: as long as the all-reduce."""
    return halving_doubling(link, workers)


def _each_round(workers: int, latency_s: float, s_per_byte: float) -> Line:
    return Line(startup_s=rounds(workers) * latency_s, s_per_byte=rounds(workers) * s_per_byte)

"""Prices of broadcast, reduce and all-reduce by linear pipeline, spanning tree and exchange.

They are those of the Linear Pipeline paper's Table 1, with the steps that its Fig. 2 takes. The
table counts p-1 + n/b steps of a pipeline where its figure, and so our schedule, takes one
less; and it prices an all-reduce as a reduce and a broadcast, where figure and schedule fill the
pipe once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradweave._src.costs.all_reduce import halving_doubling
from gradweave._src.costs.cost import Fitting, FloatArray, Line, Numbers, fit_line, total_line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import rounds


class Passage(Protocol):
    """How blocks pass along a chain, and what that costs for any number of them."""

    def seconds(self, nbytes: FloatArray, blocks: FloatArray) -> FloatArray: ...

    def best_blocks(self, nbytes: FloatArray) -> FloatArray:
        """Return how many blocks, not always whole, are best; infinite if more always help."""
        ...


@dataclass(frozen=True, slots=True)
class OneWay:
    """A passage to the end of a chain of p workers: B blocks take p-2 + B steps of one block each.

        T(B) = (p-2 + B) (alpha + beta n/B)

    is least at B* = sqrt((p-2) beta n / alpha), where the time that more blocks cost in start-ups
    equals the time that larger ones cost in filling the pipe.
    """

    workers: int
    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: FloatArray, blocks: FloatArray) -> FloatArray:
        step_s = self.latency_s + self.s_per_byte * nbytes / blocks
        return (self.workers - 2 + blocks) * step_s

    def best_blocks(self, nbytes: FloatArray) -> FloatArray:
        return _root((self.workers - 2) * self.s_per_byte * nbytes, self.latency_s)


@dataclass(frozen=True, slots=True)
class ThereAndBack:
    """An all-reduce along a chain: sums travel to its end, then results travel to all.

    A step that adds takes s = alpha + (beta + gamma) n/B, one that does not t = alpha + beta n/B.
    The worker before the last has received all blocks to add after B + p-3 steps. After these it
    gets B sums, one a step; or, where the blocks are few, the last sum has one more step to be made
    and p-1 to arrive:

        T(B) = (B + p-3) s + max(B t, s + (p-1) t).

    Of two workers one is the chain's end: T(B) = B s + t.
    """

    workers: int
    latency_s: float
    s_per_byte: float
    sum_s_per_byte: float

    def seconds(self, nbytes: FloatArray, blocks: FloatArray) -> FloatArray:
        passing_s = self.latency_s + self.s_per_byte * nbytes / blocks
        adding_s = passing_s + self.sum_s_per_byte * nbytes / blocks
        if self.workers == 2:  # noqa: PLR2004
            return blocks * adding_s + passing_s
        waiting_s = adding_s + (self.workers - 1) * passing_s
        return (blocks + self.workers - 3) * adding_s + np.maximum(blocks * passing_s, waiting_s)

    def best_blocks(self, nbytes: FloatArray) -> FloatArray:
        """Return how many blocks make it shortest.

        T is the larger of two convex functions, so it is least where one of them is or where they
        meet.
        """
        p, a, b = self.workers, self.latency_s, self.s_per_byte
        both = b + self.sum_s_per_byte
        if p == 2:  # noqa: PLR2004
            return _root(b * nbytes, a)
        few = _root(((p - 2) * both + (p - 1) * b) * nbytes, a)
        many = _root((p - 3) * both * nbytes, 2 * a)
        # From so many blocks on, B t >= s + (p-1) t: the positive root of a quadratic.
        linear = b * nbytes - p * a
        constant = (p * b + self.sum_s_per_byte) * nbytes
        below = linear + np.sqrt(linear**2 + 4 * a * constant)
        with np.errstate(divide="ignore", invalid="ignore"):
            meeting = np.where(below > 0, 2 * constant / below, float(p))
        return np.where(few <= meeting, few, np.maximum(many, meeting))


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """A message in equal blocks along a chain: as many as cost least, or of a given size."""

    passage: Passage
    fixed_block_bytes: int | None = None

    def blocks(self, nbytes: FloatArray) -> FloatArray:
        """Return a whole number of blocks, of at least a byte each if the message has one."""
        if self.fixed_block_bytes is not None:
            return np.maximum(1.0, np.ceil(nbytes / self.fixed_block_bytes))
        most = np.maximum(1.0, np.floor(nbytes))
        fewer = np.clip(np.floor(self.passage.best_blocks(nbytes)), 1.0, most)
        more = np.minimum(fewer + 1, most)
        is_better = self.passage.seconds(nbytes, more) < self.passage.seconds(nbytes, fewer)
        return np.where(is_better, more, fewer)

    def seconds(self, nbytes: Numbers) -> Numbers:
        sizes = np.asarray(nbytes, dtype=np.float64)
        taken_s: Any = self.passage.seconds(sizes, self.blocks(sizes))
        seconds: Numbers = taken_s[()]  # of one size a number, not an array without dimensions
        return seconds

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        sizes = np.geomspace(min(1024.0, largest_bytes / 2), largest_bytes, 64)
        return fitted(sizes, self.seconds(sizes))

    @property
    def known_to_bytes(self) -> float:
        return np.inf


def _root(numerator: FloatArray, denominator: float) -> FloatArray:
    """Return the root of a fraction; where start-ups are free, as many blocks as there can be."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.sqrt(np.where(numerator > 0, numerator / denominator, 1.0))


def pipeline_broadcast(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    return PipelineCost(OneWay(workers, link.latency_s, link.s_per_byte), block_bytes)


def pipeline_reduce(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    per_byte = link.s_per_byte + link.sum_s_per_byte
    return PipelineCost(OneWay(workers, link.latency_s, per_byte), block_bytes)


def pipeline_all_reduce(link: Link, workers: int, block_bytes: int | None = None) -> PipelineCost:
    passage = ThereAndBack(workers, link.latency_s, link.s_per_byte, link.sum_s_per_byte)
    return PipelineCost(passage, block_bytes)


def mst_broadcast(link: Link, workers: int) -> Line:
    return _each_round(workers, link.latency_s, link.s_per_byte)


def mst_reduce(link: Link, workers: int) -> Line:
    return _each_round(workers, link.latency_s, link.s_per_byte + link.sum_s_per_byte)


def mst_all_reduce(link: Link, workers: int) -> Line:
    return total_line(mst_reduce(link, workers), mst_broadcast(link, workers))


def exchange_broadcast(link: Link, workers: int) -> Line:
    """Price a scatter down the tree and an all-gather around the ring."""
    return Line(
        startup_s=(rounds(workers) + workers - 1) * link.latency_s,
        s_per_byte=2 * (workers - 1) / workers * link.s_per_byte,
    )


def exchange_reduce(link: Link, workers: int) -> Line:
    """Price a reduce-scatter by halving and a gather to the root: as long as the all-reduce."""
    return halving_doubling(link, workers)


def _each_round(workers: int, latency_s: float, s_per_byte: float) -> Line:
    return Line(startup_s=rounds(workers) * latency_s, s_per_byte=rounds(workers) * s_per_byte)

"""All-reduce as in Table 2 of the MG-WFBP journal paper. The paper's log N is ceil(log2 N) here."""

from gradweave._src.costs.cost import Line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import (
    doubling_all_gather,
    halving_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
    rounds,
)


def binary_tree(link: Link, workers: int) -> Line:
    """Up the tree and down again, the whole message in every round."""
    return Line(
        startup_s=2 * link.latency_s * rounds(workers),
        s_per_byte=(2 * link.s_per_byte + link.sum_s_per_byte) * rounds(workers),
    )


def recursive_doubling(link: Link, workers: int) -> Line:
    """Pairs at distance 1, 2, 4, … swap the whole message."""
    return Line(
        startup_s=link.latency_s * rounds(workers),
        s_per_byte=(link.s_per_byte + link.sum_s_per_byte) * rounds(workers),
    )


def halving_doubling(link: Link, workers: int) -> Line:
    """Reduce-scatter by halving, all-gather by doubling: the ring's bytes in log N rounds."""
    return halving_reduce_scatter(link, workers).plus(doubling_all_gather(link, workers))


def double_tree(link: Link, workers: int) -> Line:
    """As the paper prints it, ``beta + gamma`` per byte.

    No schedule can reach that: an all-reduce sends at least ``2 (N-1)/N`` of the message over each
    worker's port. The row stays because the paper's Fig. 11 is computed with it.
    """
    return Line(
        startup_s=2 * link.latency_s * rounds(workers),
        s_per_byte=link.s_per_byte + link.sum_s_per_byte,
    )


def ring(link: Link, workers: int) -> Line:
    """2 (N-1) rounds of 1/N of the message each."""
    return ring_reduce_scatter(link, workers).plus(ring_all_gather(link, workers))

"""Exchanging only the largest gradients: the gTop-k paper's Table I, and a butterfly.

Costs are over the *dense* message of m bytes. Of it, k = density * m bytes of values travel and as
many bytes of indices, which holds for 4-byte elements and 4-byte indices.
"""

from gradweave._src.costs.cost import Line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import rounds

BYTES_PER_ELEMENT = 4


def all_gather(link: Link, workers: int, density: float) -> Line:
    """Price sending everyone's k elements to everyone: each receives 2 (P-1) k bytes."""
    return Line(
        startup_s=rounds(workers) * link.latency_s,
        s_per_byte=2 * (workers - 1) * density * link.s_per_byte,
    )


def tree(link: Link, workers: int, density: float) -> Line:
    """Price a tree that keeps k elements at every merge, then a broadcast."""
    return Line(
        startup_s=2 * rounds(workers) * link.latency_s,
        s_per_byte=4 * rounds(workers) * density * link.s_per_byte,
    )


def butterfly(link: Link, workers: int, density: float) -> Line:
    """Price an exchange by swaps between partners, which all merge alike.

    log2 P rounds; where P is no power of two, neighbours act as one, for two rounds more than the
    next lower power needs.
    """
    swaps = workers.bit_length() - 1
    messages = swaps if workers == 1 << swaps else swaps + 2
    return Line(
        startup_s=messages * link.latency_s, s_per_byte=2 * messages * density * link.s_per_byte
    )


def selection(s_per_element: float) -> Line:
    """Price finding the largest elements of a dense message and taking them out."""
    return Line(startup_s=0.0, s_per_byte=s_per_element / BYTES_PER_ELEMENT)

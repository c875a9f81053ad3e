"""The two halves of an all-reduce, by ring and by halving/doubling (BlueConnect Eqs. 1 and 2)."""

from gradweave._src.costs.cost import Line
from gradweave._src.costs.links import Link


def rounds(workers: int) -> int:
    """Return ceil(log2(workers)), the papers' log N: how often a group doubles to hold them all."""
    return (workers - 1).bit_length()


def ring_all_gather(link: Link, workers: int) -> Line:
    return _half(link.s_per_byte, workers, startup_s=(workers - 1) * link.latency_s)


def ring_reduce_scatter(link: Link, workers: int) -> Line:
    per_byte = link.s_per_byte + link.sum_s_per_byte
    return _half(per_byte, workers, startup_s=(workers - 1) * link.latency_s)


def doubling_all_gather(link: Link, workers: int) -> Line:
    return _half(link.s_per_byte, workers, startup_s=rounds(workers) * link.latency_s)


def halving_reduce_scatter(link: Link, workers: int) -> Line:
    per_byte = link.s_per_byte + link.sum_s_per_byte
    return _half(per_byte, workers, startup_s=rounds(workers) * link.latency_s)


def _half(s_per_byte: float, workers: int, *, startup_s: float) -> Line:
    """Price half of an all-reduce: each worker receives all of the message but its own 1/N."""
    return Line(startup_s=startup_s, s_per_byte=(workers - 1) / workers * s_per_byte)

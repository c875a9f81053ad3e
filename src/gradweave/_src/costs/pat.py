"""PAT, parallel aggregated trees: ceil(log2 N) start-ups and the ring's bytes, for any N."""

from gradweave._src.costs.cost import Line, total_line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import rounds


def all_gather(link: Link, workers: int) -> Line:
    return Line(
        startup_s=rounds(workers) * link.latency_s,
        s_per_byte=(workers - 1) / workers * link.s_per_byte,
    )


def reduce_scatter(link: Link, workers: int) -> Line:
    added = Line(startup_s=0.0, s_per_byte=(workers - 1) / workers * link.sum_s_per_byte)
    return total_line(all_gather(link, workers), added)


def all_reduce(link: Link, workers: int) -> Line:
    return total_line(reduce_scatter(link, workers), all_gather(link, workers))

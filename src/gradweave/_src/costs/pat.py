"""PAT, parallel aggregated trees: ceil(log2 N) start-ups and the ring's bytes, for any N."""

from gradweave._src.costs.cost import Line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import rounds


def all_gather(link: Link, workers: int) -> Line:
    return Line(
        startup_s=rounds(workers) * link.latency_s,
        s_per_byte=(workers - 1) / workers * link.s_per_byte,
    )


def reduce_scatter(link: Link, workers: int) -> Line:
    """The time to add hides once behind the last round where that needs nothing of the one before.

    The last round, at a distance of 2^(k-1) for 2^(k-1) < N <= 2^k, sends what came from half its
    distance just before; where N is not above 3/2 of the distance there is nobody to send that.
    """
    halfway = 1 << max(0, rounds(workers) - 2)
    is_hidden = 2 < workers <= 3 * halfway  # noqa: PLR2004
    added = Line(
        startup_s=0.0, s_per_byte=(workers - 1 - is_hidden) / workers * link.sum_s_per_byte
    )
    return all_gather(link, workers).plus(added)


def all_reduce(link: Link, workers: int) -> Line:
    return reduce_scatter(link, workers).plus(all_gather(link, workers))

"""All-reduce over tiers of links: Eqs. 1 to 10 of the BlueConnect paper.

The paper leaves out the time to add; here a reduce-scatter pays it, and with none the paper's
numbers come out. It has one latency for all tiers; here each tier has its own, and a stage pays the
largest of those it crosses.
"""

from math import prod

from gradweave._src.costs.cost import FREE, Line
from gradweave._src.costs.links import Link, Links
from gradweave._src.costs.scatter_gather import (
    doubling_all_gather,
    halving_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)


def best_there_and_back(link: Link, workers: int) -> Line:
    """Reduce-scatter and all-gather: by doubling for powers of two, else the ring (Eq. 3)."""
    if workers & (workers - 1) == 0:
        return halving_reduce_scatter(link, workers).plus(doubling_all_gather(link, workers))
    return ring_reduce_scatter(link, workers).plus(ring_all_gather(link, workers))


def one_level(links: Links, workers: int) -> Line:
    """One ring over everybody, as slow as its slowest link (Eqs. 5 and 6)."""
    link = links.slowest(workers)
    return ring_reduce_scatter(link, workers).plus(ring_all_gather(link, workers))


def two_level(links: Links, workers: int) -> Line:
    """Reduce to one master per innermost group, all-reduce among masters, broadcast (Eq. 7).

    Where there is one group only, nobody needs a master.
    """
    factors = links.factors(workers)
    if factors is None or factors[0] == workers:
        return one_level(links, workers)
    local, inner = factors[0], links.levels[0].link
    gather = doubling_all_gather(inner, local).plus(ring_all_gather(inner, local))  # Eq. 4
    reduce = doubling_all_gather(inner, local).plus(ring_reduce_scatter(inner, local))
    return reduce.plus(best_there_and_back(links.slowest(workers), workers // local)).plus(gather)


def blueconnect(links: Links, workers: int) -> Line:
    """Reduce-scatter tier by tier on ever smaller parts, then all-gather back (Eqs. 9 and 10).

    Where the tiers do not divide the workers it is one ring (the paper's 3.4).
    """
    factors = links.factors(workers)
    if factors is None:
        return one_level(links, workers)
    total = FREE
    for stage, members in enumerate(factors):
        crossed = range(stage + 1)
        link = Link(
            latency_s=max(links.levels[tier].link.latency_s for tier in crossed),
            s_per_byte=max(_shared_s_per_byte(links, factors, tier) for tier in crossed),
            sum_s_per_byte=max(level.link.sum_s_per_byte for level in links.levels),
        )
        on_whole_message = best_there_and_back(link, members)
        total = total.plus(_on_part(on_whole_message, 1 / prod(factors[:stage])))
    return total


def _shared_s_per_byte(links: Links, factors: tuple[int, ...], tier: int) -> float:
    """Per byte and worker when all workers behind a link of this tier send at once.

    In a fat tree everybody below the link shares it; in a torus only the workers of one node do.
    """
    sharers = (
        prod(factors[:tier]) if links.topology == "fat-tree" else prod(factors[: min(tier, 1)])
    )
    return links.levels[tier].link.s_per_byte * sharers


def _on_part(line: Line, part: float) -> Line:
    return Line(startup_s=line.startup_s, s_per_byte=line.s_per_byte * part)

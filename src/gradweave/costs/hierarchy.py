"""All-reduce over tiers of links: Eqs. 1 to 10 of the BlueConnect paper.

The paper leaves out the time to add, and so do these: a reduce-scatter costs what an all-gather
costs. It has one latency for all tiers; here each
tier has its own, and a stage pays that of the outermost tier it crosses.
"""

from math import prod

from gradweave.costs.cost import FREE, Line
from gradweave.costs.links import Link, Links
from gradweave.costs.scatter_gather import doubling_all_gather, ring_all_gather


def best_all_gather(link: Link, workers: int) -> Line:
    """Doubling for powers of two, otherwise the ring (Eq. 3)."""
    is_power_of_two = workers & (workers - 1) == 0
    return doubling_all_gather(link, workers) if is_power_of_two else ring_all_gather(link, workers)


def one_level(links: Links, workers: int) -> Line:
    """One ring over everybody, as slow as its slowest link (Eqs. 5 and 6)."""
    around = ring_all_gather(links.slowest(workers), workers)
    return around.plus(around)


def two_level(links: Links, workers: int) -> Line:
    """Reduce to one master per innermost group, all-reduce among masters, broadcast (Eq. 7)."""
    factors = links.factors(workers)
    if factors is None:
        return one_level(links, workers)
    local, inner = factors[0], links.levels[0].link
    inside = doubling_all_gather(inner, local).plus(ring_all_gather(inner, local))  # Eq. 4
    between = best_all_gather(links.slowest(workers), workers // local)
    half = inside.plus(between)
    return half.plus(half)


def blueconnect(links: Links, workers: int) -> Line:
    """Reduce-scatter tier by tier on ever smaller parts, then all-gather back (Eqs. 9 and 10).

    Where the tiers do not divide the workers it is one ring (the paper's 3.4).
    """
    factors = links.factors(workers)
    if factors is None:
        return one_level(links, workers)
    half = FREE
    for stage, members in enumerate(factors):
        link = Link(
            latency_s=links.levels[stage].link.latency_s,
            s_per_byte=max(_shared_s_per_byte(links, factors, tier) for tier in range(stage + 1)),
        )
        on_whole_message = best_all_gather(link, members)
        half = half.plus(_on_part(on_whole_message, 1 / prod(factors[:stage])))
    return half.plus(half)


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

"""All-reduce over tiers of links: Eqs. 1 to 10 of the BlueConnect paper.

The paper leaves out the time to add; here a reduce-scatter pays it, and with none the paper's
numbers come out. It has one latency for all tiers; here each tier has its own, and a stage pays the
largest of those it crosses.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from gradweave._src.costs import pat
from gradweave._src.costs.cost import FREE, Line, total_line
from gradweave._src.costs.links import Link, Links
from gradweave._src.costs.scatter_gather import (
    doubling_all_gather,
    halving_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)
from gradweave._src.errors import UnknownCost
from gradweave._src.vocabulary import Operation, Spec, alternatives, parse_tiers


class Tier(NamedTuple):
    """What the groups of a tier pay on the way in and on the way out."""

    reduce_scatter: Callable[[Link, int], Line]
    all_gather: Callable[[Link, int], Line]


RING = Tier(ring_reduce_scatter, ring_all_gather)
HALVING = Tier(halving_reduce_scatter, doubling_all_gather)

TIERS: Mapping[str, Tier] = {
    "ring": RING,
    "halving-doubling": HALVING,
    "pat": Tier(pat.reduce_scatter, pat.all_gather),
}


def best_tier(workers: int) -> Tier:
    """Choose halving and doubling for powers of two, else the ring (Eq. 3)."""
    return HALVING if workers & (workers - 1) == 0 else RING


def two_level(links: Links, workers: int) -> Line:
    """Price a reduce to one master per innermost group, their all-reduce and a broadcast (Eq. 7).

    Where there is one group only, nobody needs a master.
    """
    factors = links.factors(workers)
    if factors is None or factors[0] == workers:
        return _there_and_back(RING, links.slowest(workers), workers, "all-reduce")  # Eqs. 5, 6
    local, inner = factors[0], links.levels[0].link
    # Eq. 4
    gather = total_line(doubling_all_gather(inner, local), ring_all_gather(inner, local))
    reduce = total_line(doubling_all_gather(inner, local), ring_reduce_scatter(inner, local))
    between = links.slowest(workers)
    masters = _there_and_back(best_tier(workers // local), between, workers // local, "all-reduce")
    return total_line(reduce, masters, gather)


def blueconnect(links: Links, workers: int, spec: Spec, *, operation: Operation) -> Line:
    """Price reduce-scatters tier by tier on ever smaller parts, then all-gathers (Eqs. 9 and 10).

    Where the tiers do not divide the workers it is one ring (the paper's 3.4), unless each tier's
    way was named. The halves of an all-reduce are one way each.
    """
    factors = links.factors(workers)
    if factors is None and spec.argument is None:
        return _there_and_back(RING, links.slowest(workers), workers, operation)
    if factors is None:
        raise UnknownCost(
            f"{spec}: {workers} workers do not fill the tiers of {links.sizes_text} evenly; take a "
            f"multiple of {links.smallest_whole}"
        )
    total = FREE
    for stage, tier in enumerate(_named_tiers(spec, factors)):
        crossed = range(stage + 1)
        link = Link(
            latency_s=max(links.levels[tier].link.latency_s for tier in crossed),
            s_per_byte=max(_shared_s_per_byte(links, factors, tier) for tier in crossed),
            sum_s_per_byte=max(level.link.sum_s_per_byte for level in links.levels),
        )
        on_whole_message = _there_and_back(tier, link, factors[stage], operation)
        total = total_line(total, _on_part(on_whole_message, 1 / prod(factors[:stage])))
    return total


def _named_tiers(spec: Spec, factors: Sequence[int]) -> list[Tier]:
    if spec.argument is None:
        return [best_tier(size) for size in factors]
    named = parse_tiers(spec.argument, len(factors))
    for name in named:
        if name not in TIERS:
            raise UnknownCost(f"{spec}: no formula for {name!r}{alternatives(name, TIERS)}")
    if len(named) != len(factors):
        raise UnknownCost(
            f"{spec}: expected one name for all tiers or {len(factors)} separated by slashes, for "
            f"tiers of {', '.join(map(str, factors))}"
        )
    return [TIERS[name] for name in named]


def _there_and_back(tier: Tier, link: Link, workers: int, operation: Operation) -> Line:
    """Return the price of an all-reduce, or of its reduce-scatter or all-gather alone."""
    match operation:
        case "reduce-scatter":
            return tier.reduce_scatter(link, workers)
        case "all-gather":
            return tier.all_gather(link, workers)
    return total_line(tier.reduce_scatter(link, workers), tier.all_gather(link, workers))


def _shared_s_per_byte(links: Links, factors: tuple[int, ...], tier: int) -> float:
    """Return what a worker pays for a byte when all behind a link of this tier send at once.

    In a fat tree everybody below the link shares it; in a torus only the workers of one node do.
    """
    sharers = (
        prod(factors[:tier]) if links.topology == "fat-tree" else prod(factors[: min(tier, 1)])
    )
    return links.levels[tier].link.s_per_byte * sharers


def _on_part(line: Line, part: float) -> Line:
    return Line(startup_s=line.startup_s, s_per_byte=line.s_per_byte * part)

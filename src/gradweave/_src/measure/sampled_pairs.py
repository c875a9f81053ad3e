"""Which pairs of ranks stand for all links of a tier, and how sure the answer is.

Timing every link of a tier takes as long as there are ranks. A few pairs, drawn at random, take the
same time in any world, and how far they differ tells how far others may. Choosing and judging are
decisions, so there is no torch and no clock here.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from msgspec import Struct

from gradweave._src.checks import require_not_negative
from gradweave._src.collectives.topology import Topology
from gradweave._src.vocabulary import size_text, time_text

MOST_PAIRS = 5
DRAWS_EACH = 20


class Typical(Struct, frozen=True, kw_only=True):
    """A number of a tier, from a sample of its links: the median, the least and the greatest.

    Of n links drawn at random the median of all lies between the least and the greatest with a
    probability of 1 - 2^(1-n), whatever their distribution is.
    """

    median: float
    least: float
    greatest: float
    pairs: int

    def __post_init__(self) -> None:
        require_not_negative(self, "median", "least", "greatest")

    @property
    def confidence(self) -> float:
        return 1.0 - 2.0 ** (1 - self.pairs)


class TierSample(Struct, frozen=True, kw_only=True):
    """What the sampled links of one tier showed."""

    latency_s: Typical
    s_per_byte: Typical

    def text(self) -> str:
        """Say ``15.0 us (14.0 us to 16.1 us) and 118.0 MB/s (…), 5 pairs, 94 % sure``.

        One pair says nothing of others.
        """
        latency, slope = self.latency_s, self.s_per_byte
        rates = [f"{size_text(1 / one)}/s" if one else "any rate" for one in slope_ends(slope)]
        if latency.pairs == 1:
            return f"{time_text(latency.median)} and {rates[0]}, 1 pair"
        return (
            f"{time_text(latency.median)} ({time_text(latency.least)} to "
            f"{time_text(latency.greatest)}) and {rates[0]} ({rates[1]} to {rates[2]}), "
            f"{latency.pairs} pairs, {latency.confidence:.0%} sure"
        )


def slope_ends(slope: Typical) -> tuple[float, float, float]:
    """Return the median and both ends, the slowest rate first."""
    return slope.median, slope.greatest, slope.least


def typical(values: Sequence[float]) -> Typical:
    """Sum up a sample, which has one value for each pair."""
    return Typical(
        median=float(np.median(values)),
        least=min(values),
        greatest=max(values),
        pairs=len(values),
    )


def sampled_pairs(
    topology: Topology, tier: int, *, most: int = MOST_PAIRS, seed: int = 0
) -> list[tuple[int, int]]:
    """Return at most so many pairs of ranks whose outermost difference is this tier.

    All ranks draw the same: the seed is an argument.
    """
    inner, size = prod(topology.factors[:tier]), topology.factors[tier]
    random = np.random.default_rng([seed, tier])
    pairs: dict[tuple[int, int], None] = {}
    # A pair that comes twice is drawn again. A small world may have fewer pairs than asked for.
    for _ in range(DRAWS_EACH * most):
        if len(pairs) == most or size == 1:
            break
        place, other = random.choice(size, size=2, replace=False).tolist()
        base = int(random.integers(topology.ranks // (inner * size))) * inner * size
        within = base + int(random.integers(inner))
        ends = sorted((within + place * inner, within + other * inner))
        pairs[topology.order[ends[0]], topology.order[ends[1]]] = None
    return list(pairs)

"""Which ranks are close to each other, so that algorithms can follow the network."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gradweave._src.collectives.schedule import IntArray


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks in an order that keeps neighbours together, and the sizes of their groups.

    ``factors`` are innermost first: ranks per host, hosts per rack, racks. Where groups are not of
    equal size there is one factor, all ranks.
    """

    order: tuple[int, ...]
    factors: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"order must name every rank once, got {self.order}")
        if prod(self.factors) != len(self.order):
            raise ValueError(f"factors {self.factors} do not multiply to {len(self.order)} ranks")

    @property
    def ranks(self) -> int:
        return len(self.order)

    def beginning_with(self, root: int) -> IntArray:
        """The order, turned so that ``root`` comes first."""
        place = self.order.index(root)
        return np.array(self.order[place:] + self.order[:place])


def flat_topology(ranks: int) -> Topology:
    return Topology(tuple(range(ranks)), (ranks,))


def topology_of(hosts: Sequence[Hashable], racks: Sequence[Hashable] | None = None) -> Topology:
    """From the name of each rank's host, and of its rack where they are known."""
    if racks is not None and len(racks) != len(hosts):
        raise ValueError(f"{len(hosts)} ranks have hosts and {len(racks)} have racks")
    rack_of = list(racks) if racks is not None else [None] * len(hosts)
    places: list[tuple[Hashable, ...]] = list(zip(rack_of, hosts, strict=True))
    first_seen = {place: rank for rank, place in reversed(list(enumerate(places)))}
    rack_seen = {rack: rank for rank, rack in reversed(list(enumerate(rack_of)))}
    order = sorted(
        range(len(hosts)),
        key=lambda rank: (rack_seen[rack_of[rank]], first_seen[places[rank]], rank),
    )
    return Topology(tuple(order), _factors(places))


def _factors(places: Sequence[tuple[Hashable, ...]]) -> tuple[int, ...]:
    per_host = set(Counter(places).values())
    hosts_per_rack = set(Counter(rack for rack, _ in set(places)).values())
    if len(per_host) > 1:
        return (len(places),)
    (local,) = per_host
    if len(hosts_per_rack) > 1:
        return _without_ones((local, len(places) // local))
    (hosts,) = hosts_per_rack
    return _without_ones((local, hosts, len(places) // (local * hosts)))


def _without_ones(factors: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(factor for factor in factors if factor > 1) or (1,)

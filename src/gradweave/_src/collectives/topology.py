"""Which ranks are close to each other, so that algorithms can follow the network."""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
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
        """Return the order, turned so that ``root`` comes first."""
        place = self.order.index(root)
        return np.array(self.order[place:] + self.order[:place])


def flat_topology(ranks: int) -> Topology:
    return Topology(tuple(range(ranks)), (ranks,))


def topology_of(hosts: Sequence[Hashable], *outer: Sequence[Hashable]) -> Topology:
    """Group ranks by the name of their host, and by those of rack, pod and so on where known.

    Groups that are not of equal size, and all that lies beyond them, are one group.
    """
    for names in outer:
        if len(names) != len(hosts):
            raise ValueError(f"{len(hosts)} ranks have hosts and {len(names)} have racks")
    # A place is a path from the outermost tier to the host, so that equal names in different racks
    # are different hosts.
    places = list(zip(*reversed(outer), hosts, strict=True))
    depths = range(len(places[0]), 0, -1) if places else range(0)
    # A group stands where its first rank does. The outermost tier decides first: lexsort's last
    # key.
    columns = [np.arange(len(places))]
    for depth in depths:
        first_seen: dict[tuple[Hashable, ...], int] = {}
        groups = (place[:depth] for place in places)
        columns.append(
            np.array([first_seen.setdefault(group, rank) for rank, group in enumerate(groups)])
        )
    order = np.lexsort(columns).tolist()
    return Topology(tuple(order), _factors(places))


def _factors(places: Sequence[tuple[Hashable, ...]]) -> tuple[int, ...]:
    """Return how many groups of each tier are in one of the next, innermost first."""
    sizes: list[int] = []
    members: Collection[tuple[Hashable, ...]] = places
    for depth in reversed(range(len(places[0]) + 1)):
        counted = Counter(place[:depth] for place in members)
        if len(set(counted.values())) > 1:
            break
        sizes.append(next(iter(counted.values())))
        members = counted.keys()
    else:
        return _without_ones(tuple(sizes))
    return _without_ones((*sizes, len(places) // prod(sizes)))


def _without_ones(factors: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(factor for factor in factors if factor > 1) or (1,)

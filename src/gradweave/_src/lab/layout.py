"""Which bridges and cables make up a cluster: a pure function of its spec.

A cable is a veth pair. Its *upper* end is nearer to the core and always a bridge's port; its
*lower* end is the port of another bridge, or an interface of a rank. Both ends are shaped, so
both directions are.
"""

from collections.abc import Mapping

from msgspec import Struct

from gradweave._src.lab.spec import INTERFACE, SECOND_INTERFACE, ClusterSpec, checked_rate

CORE, SECOND = "core", "second"


class Cable(Struct, frozen=True, kw_only=True):
    """A link between a bridge and what hangs below it: another bridge, or a rank."""

    upper_bridge: str
    lower_bridge: str | None = None
    rank: int | None = None
    lower: str  # what hangs below, for the names of the interfaces
    bits_per_s: int | None = None
    delay_s: float = 0.0  # upwards only, so that a packet between two nodes meets it once
    interface: str = INTERFACE  # what a rank calls its end
    address: str | None = None  # of the rank at its end

    @property
    def upper_name(self) -> str:
        return f"to-{self.lower}"

    @property
    def lower_name(self) -> str:
        return self.interface if self.lower_bridge is None else f"from-{self.lower}"


class Layout(Struct, frozen=True, kw_only=True):
    bridges: tuple[str, ...]
    racks: tuple[Cable, ...]
    nodes: tuple[Cable, ...]
    ranks: tuple[Cable, ...]  # none where a node's own cable ends in its only rank
    seconds: tuple[Cable, ...]  # to the second interfaces, if there are any

    @property
    def cables(self) -> tuple[Cable, ...]:
        return self.racks + self.nodes + self.ranks + self.seconds

    @property
    def ways(self) -> tuple[tuple[Cable, ...], ...]:
        """For each rank the cables from its interface to the core; then from each second one."""
        above = {cable.lower_bridge: cable for cable in self.racks + self.nodes}
        return tuple(_way(cable, above) for cable in (*(self.ranks or self.nodes), *self.seconds))


def lay_out(spec: ClusterSpec) -> Layout:
    alone = spec.ranks_per_node == 1
    racks = range(spec.racks) if spec.racks > 1 else range(0)
    rack_names = [f"rack{rack}" for rack in racks]
    node_names = [f"node{node}" for node in range(spec.nodes)]
    return Layout(
        bridges=(
            CORE,
            *rack_names,
            *(() if alone else node_names),
            *(() if spec.second_rate is None else (SECOND,)),
        ),
        racks=tuple(
            Cable(
                upper_bridge=CORE, lower_bridge=name, lower=name, bits_per_s=_bits(spec.uplink_rate)
            )
            for name in rack_names
        ),
        nodes=tuple(
            Cable(
                upper_bridge=rack_names[spec.rack_of(node)] if rack_names else CORE,
                lower_bridge=None if alone else name,
                rank=node if alone else None,
                address=spec.address_of(node) if alone else None,
                lower=name,
                bits_per_s=_bits(spec.rate),
                delay_s=spec.delay_s,
            )
            for node, name in enumerate(node_names)
        ),
        ranks=tuple(
            Cable(
                upper_bridge=node_names[spec.node_of(rank)],
                rank=rank,
                address=spec.address_of(rank),
                lower=f"rank{rank}",
                bits_per_s=_bits(spec.local_rate),
            )
            for rank in range(0 if alone else spec.world_size)
        ),
        seconds=tuple(
            Cable(
                upper_bridge=SECOND,
                rank=rank,
                interface=SECOND_INTERFACE,
                address=spec.second_address_of(rank),
                lower=f"second{rank}",
                bits_per_s=_bits(spec.second_rate),
            )
            for rank in range(0 if spec.second_rate is None else spec.world_size)
        ),
    )


def _bits(rate: str | None) -> int | None:
    return None if rate is None else checked_rate(rate)


def _way(cable: Cable, above: Mapping[str | None, Cable]) -> tuple[Cable, ...]:
    if cable.upper_bridge in {CORE, SECOND}:
        return (cable,)
    return cable, *_way(above[cable.upper_bridge], above)

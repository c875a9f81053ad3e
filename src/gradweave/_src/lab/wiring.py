"""The fabric's network: a layout built of namespaces, bridges and veth pairs, and its changes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from pyroute2 import IPRoute

from gradweave._src.lab.layout import Cable, lay_out
from gradweave._src.lab.namespaces import Namespace, entered, new_host, new_network_namespace
from gradweave._src.lab.readings import Rates, SentBytes
from gradweave._src.lab.shaping import (
    MAX_SEGMENT_BYTES,
    TokenBucket,
    shape,
    shaped_bits_per_s,
    token_bucket,
)
from gradweave._src.lab.spec import PREFIX_BITS, ClusterSpec

_NETWORK_SETTINGS = {
    # Router solicitations and the like would be counted as bytes that the ranks sent.
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv6/conf/all/disable_ipv6": "1",
    # Every machine has Reno, and any user may choose it. BBR, the default of some machines, probes
    # for bandwidth: gloo's all-reduce of 16 MB on 4 nodes at 1 Gbit/s took 202 to 224 ms with it
    # (the middle 80 % of 15), and 201 to 203 with Reno.
    "ipv4/tcp_congestion_control": "reno",
}


class _End(Struct, frozen=True):
    """An interface: its network namespace (None is the fabric's own), and its index there."""

    network: Namespace | None
    index: int


class Wiring:
    """The cluster's network, for as long as this process lives."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._layout = lay_out(spec)
        self._home = Namespace("net"), Namespace("uts")
        self._hosts = [new_host(f"node{node}", self._home[1]) for node in range(spec.nodes)]
        self._networks = [new_network_namespace(self._home[0]) for _ in range(spec.world_size)]
        self._ends: dict[str, tuple[_End, _End]] = {}  # lower and upper, by what hangs below
        self._buckets: dict[str, TokenBucket | None] = {}
        self._ipr = IPRoute()
        self._build()
        self._at_first = self._counted()

    def rank(self, rank: int) -> AbstractContextManager[None]:
        """Let what is started within a block run as this rank."""
        host = self._hosts[self._spec.node_of(rank)]
        return entered(self._networks[rank], host, home=self._home)

    def plug(self, node: int, *, plugged: bool) -> None:
        _, upper = self._ends[self._layout.nodes[node].lower]
        self._ipr.link("set", index=upper.index, state="up" if plugged else "down")

    def set_rate(self, node: int, bits_per_s: int) -> None:
        self._shape(self._layout.nodes[node], bits_per_s)
        self._fit_segments()

    def rates(self, node: int) -> Rates:
        found = []
        for end in self._ends[self._layout.nodes[node].lower]:
            with self._netlink(end.network) as ipr:
                found.append(shaped_bits_per_s(ipr, end.index))
        return Rates(*found)

    def sent(self) -> SentBytes:
        return self._counted().since(self._at_first)

    def _counted(self) -> SentBytes:
        return SentBytes(
            tuple(self._arrived(cable) for cable in self._layout.nodes),
            tuple(self._arrived(cable) for cable in self._layout.racks),
        )

    def _arrived(self, cable: Cable) -> int:
        """Return the bytes that came up a cable, counted behind the shaped link."""
        _, upper = self._ends[cable.lower]
        (link,) = self._ipr.get_links(upper.index)
        return int(link.get_attr("IFLA_STATS64")["rx_bytes"])

    @contextmanager
    def _netlink(self, network: Namespace | None) -> Iterator[IPRoute]:
        """Open a rank's netlink for a block: kept open, each would hold five files."""
        if network is None:
            yield self._ipr
            return
        with entered(network, home=self._home), IPRoute() as ipr:
            yield ipr

    def _build(self) -> None:
        _configure()
        for name in self._layout.bridges:
            self._ipr.link("add", ifname=name, kind="bridge")
            self._ipr.link("set", index=_index(self._ipr, name), state="up")
        for network in self._networks:
            with self._netlink(network) as ipr:
                _configure()
                ipr.link("set", index=_index(ipr, "lo"), state="up")
        for cable in self._layout.cables:
            self._ends[cable.lower] = self._lower_end(cable), self._upper_end(cable)
            self._shape(cable, cable.bits_per_s)
        self._fit_segments()

    def _lower_end(self, cable: Cable) -> _End:
        """Lay a cable and return its lower end; call it before ``_upper_end``."""
        network = None if cable.rank is None else self._networks[cable.rank]
        peer: dict[str, str | int] = {"ifname": cable.lower_name}
        if network is not None:
            peer["net_ns_fd"] = network.fd
        self._ipr.link("add", ifname=cable.upper_name, kind="veth", peer=peer)
        with self._netlink(network) as ipr:
            index = _index(ipr, cable.lower_name)
            if cable.address is not None:
                ipr.addr("add", index=index, address=cable.address, prefixlen=PREFIX_BITS)
            if cable.lower_bridge is not None:
                ipr.link("set", index=index, master=_index(ipr, cable.lower_bridge))
            ipr.link("set", index=index, state="up")
        return _End(network, index)

    def _upper_end(self, cable: Cable) -> _End:
        index = _index(self._ipr, cable.upper_name)
        self._ipr.link("set", index=index, master=_index(self._ipr, cable.upper_bridge))
        self._ipr.link("set", index=index, state="up")
        return _End(None, index)

    def _shape(self, cable: Cable, bits_per_s: int | None) -> None:
        bucket = None if bits_per_s is None else token_bucket(bits_per_s)
        self._buckets[cable.lower] = bucket
        lower, upper = self._ends[cable.lower]
        with self._netlink(lower.network) as ipr:
            shape(ipr, lower.index, bucket, delay_s=cable.delay_s)
        shape(self._ipr, upper.index, bucket, delay_s=0.0)

    def _fit_segments(self) -> None:
        """Let TCP build packets that fit the buckets on their way, which else cut them up.

        Four pairs of nodes at 400 Mbit/s: 382 Mbit/s of payload for each, without this 286 to 349.
        """
        for way in self._layout.ways:
            buckets = [self._buckets[cable.lower] for cable in way]
            sizes = [bucket.segment_bytes for bucket in buckets if bucket]
            lower, _ = self._ends[way[0].lower]
            with self._netlink(lower.network) as ipr:
                ipr.link(
                    "set", index=lower.index, gso_max_size=min(sizes, default=MAX_SEGMENT_BYTES)
                )


def _index(ipr: IPRoute, name: str) -> int:
    (index,) = ipr.link_lookup(ifname=name)
    return int(index)


def _configure() -> None:
    """Write the settings of the network namespace that this process is in."""
    for name, value in _NETWORK_SETTINGS.items():
        with suppress(OSError):  # a kernel without IPv6; a container where /proc is not ours
            Path("/proc/sys/net", name).write_text(value)

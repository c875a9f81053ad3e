"""What a checkup finds: about each rank by itself, and between hosts."""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_interface
from typing import Literal

from msgspec import Struct

# What made gloo take an address: its variable, the host's name, or that neither led anywhere.
ChosenBy = Literal["GLOO_SOCKET_IFNAME", "the host name", "nothing else"]


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface of a host."""

    name: str
    addresses: tuple[str, ...]  # with their prefixes, as 10.77.0.1/16
    is_up: bool
    is_physical: bool = False  # a card, or several as one
    mtu: int = 1500
    bits_per_s: int | None = None  # as its driver says, where it says so

    @property
    def is_loopback(self) -> bool:
        return any(ip_interface(address).is_loopback for address in self.addresses)


class RankFacts(Struct, frozen=True, kw_only=True):
    """What one rank finds in its own surroundings."""

    rank: int
    host: str
    machine: str  # differs on hosts of the same name; the same on all of an emulated cluster
    chosen_by: ChosenBy
    interface: str | None  # which gloo will use; None where there is none of that name
    address: str | None
    toward_meeting: str | None  # the interface on the way to MASTER_ADDR
    interfaces: tuple[Interface, ...]
    cores: tuple[int, ...]  # that this rank may use
    host_cores: int
    threads: int  # that torch computes with
    load: float  # processes that want a core, over the last minute
    settings: dict[str, str]  # variables that choose interfaces and threads
    versions: dict[str, str]

    @property
    def is_on_loopback(self) -> bool:
        return self.address is not None and ip_address(self.address).is_loopback

    @property
    def used_interface(self) -> Interface | None:
        return next((one for one in self.interfaces if one.name == self.interface), None)

    @property
    def network(self) -> str | None:
        """The network that its address belongs to."""
        return next(
            (
                str(ip_interface(text).network)
                for one in self.interfaces
                for text in one.addresses
                if text.partition("/")[0] == self.address
            ),
            None,
        )


class Speed(Struct, frozen=True, kw_only=True):
    """The rate from one rank to another, while nobody else sends."""

    sender: int
    receiver: int
    round_trip_s: float  # of an empty message
    bytes_per_s: float
    core_share: float = 0.0  # the share of the time in which a core of the busier end worked


class Flow(Struct, frozen=True, kw_only=True):
    """The rate from one rank to another, while every host sends and receives."""

    sender: int
    receiver: int
    bytes_per_s: float


class Unreached(Struct, frozen=True, kw_only=True):
    """A message that did not arrive."""

    sender: int
    receiver: int
    address: str
    stage: Literal["connecting", "sending"]
    reason: str


class AllReduce(Struct, frozen=True, kw_only=True):
    """What gloo's all-reduce of all ranks takes."""

    nbytes: int
    seconds: float


class Host(Struct, frozen=True, kw_only=True):
    """The ranks of one machine; the first of them speaks for it."""

    name: str
    ranks: tuple[RankFacts, ...]

    @property
    def first(self) -> RankFacts:
        return self.ranks[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.first.address or 'no address'})"


class Checkup(Struct, frozen=True, kw_only=True):
    """Everything that was found out; what could not be is empty."""

    meeting_point: str
    world_size: int
    timeout_s: float
    ranks: tuple[RankFacts, ...]  # those that have come
    unreached: tuple[Unreached, ...] = ()
    alone: tuple[Speed, ...] = ()
    together: tuple[Flow, ...] = ()
    clock_offsets_s: dict[int, float] = {}  # to add to a rank's clock to read rank 0's
    all_reduces: tuple[AllReduce, ...] = ()
    gloo_problem: str | None = None  # why gloo could not connect its ranks, though we could
    lost: tuple[int, ...] = ()  # ranks that came and then fell silent
    lost_while: str = ""
    took_s: float = 0.0

    @property
    def absent(self) -> tuple[int, ...]:
        come = {facts.rank for facts in self.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in come)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return hosts_of(self.ranks)

    @property
    def rates(self) -> dict[tuple[int, int], float]:
        """Bytes per second between hosts, by the ranks that speak for them, each pair alone."""
        ends = {host.first.rank for host in self.hosts}
        return {
            (one.sender, one.receiver): one.bytes_per_s
            for one in self.alone
            if {one.sender, one.receiver} <= ends
        }


def hosts_of(ranks: Iterable[RankFacts]) -> tuple[Host, ...]:
    """Group ranks by machine; machines with the same name are told apart by their ranks."""
    members: dict[tuple[str, str], list[RankFacts]] = {}
    for facts in sorted(ranks, key=lambda one: one.rank):
        members.setdefault((facts.host, facts.machine), []).append(facts)
    names = [name for name, _ in members]
    return tuple(
        Host(
            name=name if names.count(name) == 1 else f"{name} of rank {found[0].rank}",
            ranks=tuple(found),
        )
        for (name, _), found in members.items()
    )


def host_of_rank(hosts: Iterable[Host]) -> Mapping[int, Host]:
    return {facts.rank: host for host in hosts for facts in host.ranks}

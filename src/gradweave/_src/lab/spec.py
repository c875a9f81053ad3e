"""What an emulated cluster consists of, and what each of its ranks is told."""

from collections.abc import Mapping

from msgspec import Struct

from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import parse_duration, parse_rate

MAX_NODES = MAX_RANKS_PER_NODE = 254  # one byte of an address each
# The kernel's token bucket holds bytes per second in 32 bits; below the least rate a single
# Ethernet frame takes longer than TCP's first time-out.
MIN_BITS_PER_S, MAX_BITS_PER_S = 100_000, 32 * 10**9
MAX_DELAY_S = 10.0

INTERFACE, SECOND_INTERFACE = "eth0", "eth1"
PREFIX_BITS = 16
FIRST_PORT = 29500  # torchrun's


class ClusterSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an emulated cluster consists of: nodes of equal size behind links of equal rate.

    Every rate holds in both directions. Rates and durations are texts with a unit.

    Attributes:
        nodes: how many there are, at most 254.
        ranks_per_node: how many ranks each of them has, at most 254.
        rate: of the link of a node, such as "1gbit"; None is as fast as the kernel.
        local_rate: of the link of a rank inside of its node.
        racks: how many racks share the nodes evenly.
        uplink_rate: of the link of a rack to the core; it needs at least two racks.
        delay: from node to node, one way, such as "0.2ms".
        second_rate: of a second interface of each rank, on a network of its own; None: it has none.

    Raises:
        RequestError: if a number or a rate is out of range, or racks do not share nodes evenly.

    Examples:
        >>> spec = gradweave.lab.ClusterSpec(nodes=4, rate="1gbit", delay="0.2ms")
        >>> spec.world_size, spec.address_of(3)
        (4, '10.77.3.1')
    """

    nodes: int
    ranks_per_node: int = 1
    rate: str | None = None
    local_rate: str | None = None
    racks: int = 1
    uplink_rate: str | None = None
    delay: str | None = None
    second_rate: str | None = None

    def __post_init__(self) -> None:
        for field, most in (("nodes", MAX_NODES), ("ranks_per_node", MAX_RANKS_PER_NODE)):
            found = getattr(self, field)
            if not 1 <= found <= most:
                raise RequestError(f"{field} must be between 1 and {most}, got {found}")
        if self.racks < 1 or self.nodes % self.racks:
            raise RequestError(f"racks must divide the {self.nodes} nodes evenly, got {self.racks}")
        if self.uplink_rate is not None and self.racks == 1:
            raise RequestError(
                f"uplink_rate {self.uplink_rate} needs at least two racks, got racks=1"
            )
        for field in ("rate", "local_rate", "uplink_rate", "second_rate"):
            if getattr(self, field) is not None:
                checked_rate(getattr(self, field), field)
        if self.delay is not None and not 0 <= parse_duration(self.delay) <= MAX_DELAY_S:
            raise RequestError(f"delay must be at most {MAX_DELAY_S:g}s, got {self.delay}")

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.ranks_per_node

    @property
    def delay_s(self) -> float:
        """The delay from node to node in seconds, one way."""
        return parse_duration(self.delay) if self.delay else 0.0

    def node_of(self, rank: int) -> int:
        """Return the node of a rank; RequestError where there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise RequestError(f"rank must be between 0 and {self.world_size - 1}, got {rank}")
        return rank // self.ranks_per_node

    def rack_of(self, node: int) -> int:
        """Return the rack of a node; RequestError where there is no such node."""
        self.ranks_of(node)
        return node // (self.nodes // self.racks)

    def address_of(self, rank: int) -> str:
        """Return the address of a rank; RequestError where there is no such rank."""
        return f"10.77.{self.node_of(rank)}.{rank % self.ranks_per_node + 1}"

    def second_address_of(self, rank: int) -> str:
        """Return a rank's address on the second network, which ``second_rate`` gives to all."""
        return self.address_of(rank).replace("10.77.", "10.78.", 1)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node; RequestError where there is no such node."""
        if not 0 <= node < self.nodes:
            raise RequestError(f"node must be between 0 and {self.nodes - 1}, got {node}")
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def checked_rate(text: str, field: str = "rate") -> int:
    """Return bits per second; RequestError where the kernel cannot shape such a rate."""
    bits_per_s = parse_rate(text)
    if not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        raise RequestError(f"{field} must be between 100kbit and 32gbit, got {text}")
    return bits_per_s


class MeetingPoint(Struct, frozen=True):
    """Where the ranks of a job find each other."""

    address: str
    port: int
    interface: str


def rank_environment(
    spec: ClusterSpec, rank: int, *, base: Mapping[str, str], meeting: MeetingPoint
) -> dict[str, str]:
    """Return ``base`` with what torchrun would add, and defaults for many ranks on few cores."""
    return {
        **agent_environment(base),
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(rank % spec.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "GROUP_RANK": str(spec.node_of(rank)),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "GLOO_SOCKET_IFNAME": meeting.interface,
    }


def agent_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with defaults for many ranks on few cores."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # or lines would come when the rank ends
        **base,
    }


def hosts_file(spec: ClusterSpec) -> str:
    """Return names for all addresses; torch also asks for IPv6 ones, and warns without them."""
    lines = ["127.0.0.1 localhost"]
    for rank in range(spec.world_size):
        address, local = spec.address_of(rank), rank % spec.ranks_per_node
        name = f"node{spec.node_of(rank)}" + (f"-{local}" if local else "")
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    return "\n".join([*lines, ""])

"""What can be read off an emulated cluster while it runs."""

from msgspec import Struct


class SentBytes(Struct, frozen=True):
    """The bytes that each node and rack has sent on its uplink.

    The kernel counts them since the cluster was built, with Ethernet headers.

    Attributes:
        by_node: bytes of each node.
        by_rack: bytes of each rack; empty where there is one rack.
    """

    by_node: tuple[int, ...]
    by_rack: tuple[int, ...]

    def since(self, earlier: "SentBytes") -> "SentBytes":
        """Return what was sent between an ``earlier`` reading and this one."""
        return SentBytes(
            tuple(b - a for a, b in zip(earlier.by_node, self.by_node, strict=True)),
            tuple(b - a for a, b in zip(earlier.by_rack, self.by_rack, strict=True)),
        )


class Rates(Struct, frozen=True):
    """The rates to which the kernel holds a node's link.

    Attributes:
        out_bits_per_s: bits per second from the node; None where the link is not shaped.
        in_bits_per_s: bits per second to the node; None where the link is not shaped.
    """

    out_bits_per_s: int | None
    in_bits_per_s: int | None

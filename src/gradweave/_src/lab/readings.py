"""What can be read off an emulated cluster while it runs."""

from msgspec import Struct


class SentBytes(Struct, frozen=True):
    """Bytes on the way up, Ethernet headers included, since the cluster was built."""

    by_node: tuple[int, ...]
    by_rack: tuple[int, ...]  # empty where there is one rack

    def since(self, earlier: "SentBytes") -> "SentBytes":
        return SentBytes(
            tuple(b - a for a, b in zip(earlier.by_node, self.by_node, strict=True)),
            tuple(b - a for a, b in zip(earlier.by_rack, self.by_rack, strict=True)),
        )


class Rates(Struct, frozen=True):
    """What the kernel holds a node's link to; None where it is not shaped."""

    out_bits_per_s: int | None
    in_bits_per_s: int | None

"""One thing that is wrong, and what to do about it."""

from typing import Literal

from msgspec import Struct

Kind = Literal[
    "absent",
    "lost",
    "loopback",
    "no-interface",
    "other-network",
    "slower-interface",
    "unreached",
    "gloo",
    "slow-host",
    "slow-link",
    "slow-uplink",
    "shared-uplink",
    "slow-together",
    "latency",
    "shared-core",
    "one-core",
    "threads",
    "busy",
    "versions",
    "clock",
]


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    kind: Kind
    ranks: tuple[int, ...]  # that are concerned
    what: str
    advice: str

    @property
    def line(self) -> str:
        return f"{self.what}: {self.advice}"

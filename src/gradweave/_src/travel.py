"""How gradients travel, in a name: a collective, and what they are rounded to on the way."""

from typing import NamedTuple

from gradweave._src.compression import Compression, parse_compression
from gradweave._src.errors import RequestError

ROUNDED_BY = "+"


class Travel(NamedTuple):
    """A way for gradients to travel, such as ring+bf16.

    Attributes:
        collective: the name of the collective that sends them.
        compression: how they are rounded or thinned out; None if they travel as they are.
    """

    collective: str
    compression: Compression | None = None

    def __str__(self) -> str:
        """Return the name as measured costs have it: ``ring``, ``ring+bf16``, ``gtopk:0.001``."""
        if self.compression is None:
            return self.collective
        if self.compression.rounding is None:
            return str(self.compression)
        return f"{self.collective}{ROUNDED_BY}{self.compression}"


def parse_travel(name: str) -> Travel:
    """Read ``ring+bf16``, by ring and rounded to bf16, or ``ring``, which rounds nothing."""
    collective, plus, rounding = name.partition(ROUNDED_BY)
    if not plus:
        return Travel(name)
    compression = parse_compression(rounding)
    if compression.rounding is None:
        raise RequestError(f"{name!r}: {rounding} has an exchange of its own; write it alone")
    return Travel(collective, compression)

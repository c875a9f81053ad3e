"""What float32 numbers are rounded to on the wire. A new format is a class and a line here."""

from collections.abc import Mapping
from typing import Protocol

import torch

from gradweave._src.comm.rounding.eight_bits import EightBits
from gradweave._src.comm.rounding.sixteen_bits import SixteenBits
from gradweave._src.compression import RoundingName

__all__ = ["WIRE_FORMATS", "WireFormat"]


class WireFormat(Protocol):
    """Turns flat float32 values into bytes and back; the same bits on every machine.

    A message consists of whole words of 4 bytes, so that messages in a row are aligned.
    """

    def nbytes(self, elements: int) -> int: ...

    def encode(
        self, values: torch.Tensor, message: torch.Tensor, *, dropped: torch.Tensor | None
    ) -> None:
        """Round ``values`` into ``message``; what that drops is added to ``dropped``."""
        ...

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        """Replace ``values`` by what the message says."""
        ...

    def add(self, message: torch.Tensor, values: torch.Tensor) -> None:
        """Add what the message says, in float32."""
        ...


WIRE_FORMATS: Mapping[RoundingName, WireFormat] = {
    "bf16": SixteenBits(torch.bfloat16),
    "fp16": SixteenBits(torch.float16),
    "int8": EightBits(),
}

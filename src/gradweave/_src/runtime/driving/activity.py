"""One rank's share in carrying out what a planning session asks for, while training goes on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gradweave._src.session.commands import Reply


class Activity(ABC):
    """Something that goes on beside the training, and notes what it needs of each step."""

    def forward_begins(self, batch_size: int) -> None:  # noqa: B027
        """Note that a pass with gradients begins."""

    def pass_over(self) -> None:  # noqa: B027
        """Note that a synchronised backward pass is over, which all ranks are told as often."""

    def step_over(self) -> None:  # noqa: B027
        """Note that a step is over, of one or more such passes; the last has been told of."""

    @abstractmethod
    def part(self) -> Any:
        """Return what it has come to, or Failed; None while it goes on."""

    @abstractmethod
    def agreed(self, parts: Sequence[Any]) -> Reply:
        """Return what all ranks' parts come to, on rank 0; none of them has failed."""

    def close(self) -> None:  # noqa: B027
        """Leave nothing open, done or not."""

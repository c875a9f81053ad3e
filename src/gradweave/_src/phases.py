"""What a rank does in a step, and how long that takes it."""

from typing import Literal, get_args

from msgspec import Struct

from gradweave._src.checks import require_not_negative

Phase = Literal["input", "forward", "backward", "network"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Phases(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one rank; together they are the whole of it.

    A step begins where the one before it ended.

    Attributes:
        input_s: seconds between two passes: the optimizer's step, and waiting for data.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the loss and the backward pass.
        network_s: seconds that this rank waits for messages while it computes nothing.
    """

    input_s: float
    forward_s: float
    backward_s: float
    network_s: float

    def __post_init__(self) -> None:
        require_not_negative(self, "input_s", "forward_s", "backward_s", "network_s")

    @property
    def step_s(self) -> float:
        """How long the whole step takes."""
        return self.input_s + self.forward_s + self.backward_s + self.network_s

    @property
    def compute_s(self) -> float:
        """What this rank does by itself, for which other ranks may have to wait."""
        return self.input_s + self.forward_s + self.backward_s

    def seconds(self, phase: Phase) -> float:
        """Return how long this phase takes."""
        seconds: float = getattr(self, f"{phase}_s")
        return seconds

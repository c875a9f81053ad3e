"""What a restart can reuse: the plan, and what it was made from."""

from msgspec import Struct

from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.trace import Trace


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan is for one trace, one network, one number of workers and one kind of device."""

    workers: int
    device: str
    plan: Plan
    trace: Trace
    network: Network
    step_s: float | None  # what a training step took with it; None: nobody measured

    def why_not(self, *, workers: int, device: str) -> str | None:
        """What has changed since, in words; None where the plan still holds."""
        if self.workers != workers:
            return f"it was made for {self.workers} workers, not {workers}"
        if self.device != device:
            return f"it was made on {self.device}, not {device}"
        return None

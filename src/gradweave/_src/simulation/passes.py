"""Whether overlap with both passes pays: the best plan for each, side by side."""

from msgspec import Struct

from gradweave._src.network import Network
from gradweave._src.simulation.scaling import Simulated, cases, run
from gradweave._src.trace import Trace


class PassesCompared(Struct, frozen=True, kw_only=True):
    """The same job with all-reduces beside backward, and with their halves beside both passes."""

    backward: Simulated
    both: Simulated

    @property
    def faster(self) -> Simulated:
        """The faster of the two; both passes if they are equally fast."""
        return min(self.both, self.backward, key=lambda one: one.outcome.iteration_s)

    @property
    def gain(self) -> float:
        """How many times as fast both passes are."""
        return self.backward.outcome.iteration_s / self.both.outcome.iteration_s


def compare_passes(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str = "optimal",
    collective: str | None = None,
) -> PassesCompared:
    """Compare both kinds of plans, without a ``collective`` each by its own default."""
    backward, both = cases(
        [trace],
        [network],
        workers=[workers],
        planners=[planner],
        collectives=[collective],
        passes=["backward", "both"],
    )
    return PassesCompared(backward=run(backward), both=run(both))

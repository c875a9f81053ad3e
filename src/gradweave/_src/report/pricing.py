"""What messages would cost on another cluster than the measured one: more workers, other links.

Among as many workers as were measured, a message costs what was measured. Among others, start-ups
and bytes each cost as many times as much as a ring's formula says: 2 (N - 1) start-ups for N
workers, and 2 (N - 1) / N of the bytes. Scaling both at once, by the formula's ratio at each size,
would make large messages cheaper than small ones where more is start-up than the formula knows.

``planner.js`` does the same on the page.
"""

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.costs import Curve, Line, Link
from gradweave._src.errors import UnknownCost
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.report.folders import Folder

LEAST_WORKERS = 2  # one alone sends nothing


class Price(Struct, frozen=True, kw_only=True):
    """What an all-reduce costs among so many workers, and by which collective."""

    collective: str
    workers: int
    cost: Line | Curve
    latency_s: float

    @property
    def startup_s(self) -> float:
        """What the cheapest message costs."""
        return self.cost.startup_s if isinstance(self.cost, Line) else min(self.cost.measured_s)

    def among(self, workers: int, *, startups: float = 1.0, per_byte: float = 1.0) -> "Price":
        """Return the price among other workers, with dearer start-ups and bytes if asked for."""
        startups *= (workers - 1) / (self.workers - 1)
        per_byte *= ((workers - 1) / workers) / ((self.workers - 1) / self.workers)
        return replace(
            self,
            workers=workers,
            cost=_scaled(self.cost, self.startup_s, startups, per_byte),
            latency_s=self.latency_s * startups,
        )

    def network(self, name: str) -> Network:
        """Return a network that knows this price and nothing else."""
        entry = CollectiveCost(
            operation="all-reduce",
            collective=self.collective,
            workers=self.workers,
            cost=self.cost,
            latency_s=self.latency_s,
        )
        return Network(name=name, source="scaled from what was measured", costs=(entry,))


def _scaled(cost: Line | Curve, startup_s: float, startups: float, per_byte: float) -> Line | Curve:
    if isinstance(cost, Line):
        return Line(startup_s=startup_s * startups, s_per_byte=cost.s_per_byte * per_byte)
    seconds = (startup_s * startups + (one_s - startup_s) * per_byte for one_s in cost.measured_s)
    return Curve(nbytes=cost.nbytes, measured_s=tuple(seconds))


def price_of(network: Network, workers: int) -> Price:
    """Return what the network's own collective costs; raise UnknownCost where that is unknown.

    Where nothing was measured, this is what the formula of a ring says on its links.
    """
    if workers < LEAST_WORKERS:
        raise UnknownCost("one worker sends no messages")
    collective = network.default_collective
    cost = network.cost("all-reduce", collective, workers=workers)
    if not isinstance(cost, Line | Curve):
        cost = cost.line(cost.known_to_bytes)
    return Price(
        collective=collective,
        workers=workers,
        cost=cost,
        latency_s=network.latency_s(collective, workers=workers),
    )


def known_price(folder: Folder) -> Price | None:
    """Return what messages of a run cost; None where its network does not know an all-reduce."""
    network = folder.run.network
    try:
        return None if network is None else price_of(network, folder.workers)
    except UnknownCost:
        return None


def ring_link(network: Network, workers: int) -> Link:
    """Return the network's own link, or one with which a ring would cost what was measured."""
    if network.links is not None:
        return network.links.slowest(workers)
    line = price_of(network, workers).cost.line(float("inf"))
    rounds = max(1, 2 * (workers - 1))
    return Link(latency_s=line.startup_s / rounds, s_per_byte=line.s_per_byte * workers / rounds)

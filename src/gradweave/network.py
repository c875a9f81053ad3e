"""What a message costs: measured curves, fitted lines, or links and a topology."""

import numpy as np
from msgspec import Struct

from gradweave.compression import Compression
from gradweave.costs import FREE, Cost, Curve, Line, Links, closed_form, sparse_closed_form
from gradweave.errors import UnknownCost
from gradweave.words import Operation, parse_spec


class CollectiveCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one operation by one collective costs among one number of workers."""

    operation: Operation
    collective: str
    workers: int
    cost: Line | Curve


class Network(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices messages, by what was measured or fitted where it can, otherwise by formula."""

    name: str
    source: str  # where the numbers come from, for people
    costs: tuple[CollectiveCost, ...] = ()
    links: Links | None = None

    def __post_init__(self) -> None:
        if not self.costs and self.links is None:
            raise ValueError("costs and links are both missing; a network needs one of them")
        seen = set()
        for known in self.costs:
            what = (known.operation, known.collective, known.workers)
            if what in seen:
                raise ValueError(f"costs: {_what(*what[:2])} for {what[2]} workers stands twice")
            seen.add(what)

    def cost(
        self,
        operation: Operation,
        collective: str,
        *,
        workers: int,
        compression: Compression | None = None,
    ) -> Cost:
        """Seconds over bytes; over the bytes of the dense message where it is compressed."""
        if workers < 1:
            raise UnknownCost(f"workers must be at least 1, got {workers}")
        if workers == 1:
            return FREE
        if compression is not None:
            return self._sparse_cost(operation, compression, workers)
        known = {
            entry.workers: entry.cost
            for entry in self.costs
            if (entry.operation, entry.collective) == (operation, collective)
        }
        if workers in known:
            return known[workers]
        if self.links is not None:
            return closed_form(operation, collective, self.links, workers)
        raise UnknownCost(self._what_is_known(operation, collective, workers, tuple(known)))

    def seconds(
        self, operation: Operation, collective: str, *, nbytes: float, workers: int
    ) -> float:
        cost = self.cost(operation, collective, workers=workers)
        return float(cost.seconds(np.array([nbytes], dtype=np.float64))[0])

    def phases(
        self, collective: str, *, workers: int, compression: Compression | None = None
    ) -> tuple[tuple[str, Cost], ...]:
        """What one gradient message does, step by step; the steps add up to its all-reduce."""
        if compression is None and parse_spec(collective).name == "parameter-server":
            push = self.cost("reduce", collective, workers=workers)
            pull = self.cost("broadcast", collective, workers=workers)
            return (("push", push), ("pull", pull))
        cost = self.cost("all-reduce", collective, workers=workers, compression=compression)
        return (("all-reduce" if compression is None else str(compression), cost),)

    @property
    def default_collective(self) -> str:
        """The one an all-reduce was measured or fitted with; on bare links the ring."""
        measured = (entry for entry in self.costs if entry.operation == "all-reduce")
        return next((entry.collective for entry in measured), "ring")

    @property
    def known_workers(self) -> tuple[int, ...] | None:
        """The numbers of workers this network was measured with; None: any, by formula."""
        if self.links is not None:
            return None
        return tuple(sorted({entry.workers for entry in self.costs}))

    def _sparse_cost(self, operation: Operation, compression: Compression, workers: int) -> Cost:
        if operation != "all-reduce":
            raise UnknownCost(f"{compression} thins out an all-reduce, not a {operation}")
        if self.links is None:
            raise UnknownCost(
                f"network {self.name!r} has no links, so the exchange of {compression} has no "
                "price; take a network with links"
            )
        return sparse_closed_form(compression, self.links, workers)

    def _what_is_known(
        self, operation: Operation, collective: str, workers: int, elsewhere: tuple[int, ...]
    ) -> str:
        """Why there is no answer, and what would have one."""
        if elsewhere:
            counts = ", ".join(str(count) for count in sorted(elsewhere))
            return (
                f"network {self.name!r} knows {_what(operation, collective)} for {counts} "
                f"workers, not for {workers}"
            )
        known = sorted({_what(entry.operation, entry.collective) for entry in self.costs})
        return (
            f"network {self.name!r} does not know {_what(operation, collective)}; "
            f"it knows {', '.join(known)}"
        )


def _what(operation: str, collective: str) -> str:
    return f"{operation} by {collective!r}"

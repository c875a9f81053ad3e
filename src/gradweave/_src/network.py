"""What a message costs: measured curves, fitted lines, or links and a topology."""

from collections.abc import Iterator
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src import notebook
from gradweave._src.checks import require_not_negative, require_one_of, require_text
from gradweave._src.compression import EXCHANGE_NAMES, Compression
from gradweave._src.costs import (
    FREE,
    Cost,
    Curve,
    Level,
    Line,
    Links,
    Share,
    Total,
    closed_form,
    has_formula,
    sparse_closed_form,
    total_line,
)
from gradweave._src.costs.sparse import selection
from gradweave._src.errors import RequestError, UnknownCost
from gradweave._src.travel import Travel, parse_travel
from gradweave._src.vocabulary import (
    Beside,
    Operation,
    alternatives,
    parse_spec,
    size_text,
    time_text,
)

OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class CollectiveCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one operation by one collective costs among one number of workers.

    A collective may be an exchange of sparse gradients, such as ``gtopk:0.001``, or one of rounded
    gradients, such as ``ring+bf16``. The cost is over the bytes of the dense message in float32;
    rounding is in it, selecting is not.

    Attributes:
        operation: "all-reduce", "broadcast", "reduce", "reduce-scatter" or "all-gather".
        collective: the algorithm, such as "native" or "ring".
        workers: the number of workers, at least 2.
        beside: "compute" where it was measured beside computing, otherwise "nothing".
        cost: the seconds between two messages that follow each other, over their bytes.
        latency_s: the seconds by which a message arrives later than the next one may leave.

    Raises:
        RequestError: if a number is out of range, or a name means nothing.

    Examples:
        >>> cost = gradweave.CollectiveCost(
        ...     operation="all-reduce",
        ...     collective="native",
        ...     workers=4,
        ...     cost=gradweave.Line(startup_s=0.001, s_per_byte=1e-8),
        ... )
    """

    operation: Operation
    collective: str
    workers: int
    beside: Beside = "nothing"
    cost: Line | Curve
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_one_of(self, operation=OPERATIONS, beside=get_args(Beside))
        require_text(self, "collective")
        require_not_negative(self, "latency_s")
        try:
            parse_travel(self.collective)
        except RequestError as error:
            raise RequestError(f"collective: {error}") from None
        if self.workers < 2:  # noqa: PLR2004
            raise RequestError(f"workers must be at least 2, got {self.workers}")


class Network(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What messages cost, by what was measured or fitted where it can, otherwise by formula.

    Where a cost was measured beside compute that is the price, for this is when gradients travel.
    ``calibrate`` and `gradweave calibrate` measure one, ``load_network`` finds a shipped one.

    Attributes:
        name: what it is called.
        source: where the numbers come from, in words.
        costs: what was measured or fitted.
        links: what formulas compute with.
        selection_s_per_element: seconds for each element to find the largest, if only they travel.

    Raises:
        RequestError: if neither costs nor links are given, or a cost stands twice.

    Examples:
        >>> network = gradweave.Network(
        ...     name="mine",
        ...     source="made up",
        ...     costs=(
        ...         gradweave.CollectiveCost(
        ...             operation="all-reduce",
        ...             collective="native",
        ...             workers=4,
        ...             cost=gradweave.Line(startup_s=0.001, s_per_byte=1e-8),
        ...         ),
        ...     ),
        ... )
        >>> network.known_workers
        (4,)
    """

    name: str
    source: str
    costs: tuple[CollectiveCost, ...] = ()
    links: Links | None = None
    selection_s_per_element: float = 0.0

    def __post_init__(self) -> None:
        require_text(self, "name")
        require_not_negative(self, "selection_s_per_element")
        if not self.costs and self.links is None:
            raise RequestError("costs and links are both missing; a network needs one of them")
        seen = set()
        for known in self.costs:
            what = (known.operation, known.collective, known.workers, known.beside)
            if what in seen:
                raise RequestError(
                    f"costs: {_what(*what[:2])} for {what[2]} workers beside {what[3]} stands twice"
                )
            seen.add(what)

    @property
    def summary(self) -> str:
        """What the network knows, in a few words."""
        known = []
        if self.costs:
            names = dict.fromkeys(entry.collective for entry in self.costs)
            counts = ", ".join(str(count) for count in self.known_workers)
            known.append(f"{', '.join(names)} with {counts} workers")
        if self.links is not None:
            known.append(f"links of {', '.join(map(_link_text, self.links.levels))}")
        return "; ".join(known)

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each measured point, fitted line and link, for a data frame."""
        return [*self._cost_rows(), *self._link_rows()]

    def _cost_rows(self) -> Iterator[dict[str, object]]:
        for entry in self.costs:
            what = {
                "operation": entry.operation,
                "collective": entry.collective,
                "workers": entry.workers,
                "beside": entry.beside,
            }
            if isinstance(entry.cost, Line):
                startup_s, s_per_byte = entry.cost.startup_s, entry.cost.s_per_byte
                yield {"kind": "line", **what, **_numbers(startup_s, s_per_byte)}
                continue
            for nbytes, seconds in zip(entry.cost.nbytes, entry.cost.measured_s, strict=True):
                point = {"nbytes": nbytes, "seconds": seconds}
                yield {"kind": "point", **what, **_numbers(None, None), **point}

    def _link_rows(self) -> Iterator[dict[str, object]]:
        nobody = dict.fromkeys(("operation", "collective", "workers", "beside"))
        for level in () if self.links is None else self.links.levels:
            link = level.link
            members = {"workers": level.members}
            yield {
                "kind": "link",
                **nobody,
                **members,
                **_numbers(link.latency_s, link.s_per_byte),
            }

    def __repr__(self) -> str:
        return f"Network({self.name!r}, {self.summary})"

    def _repr_html_(self) -> str:
        return notebook.table(repr(self), self.rows())

    def beside_nothing(self) -> "Network":
        """Return the network with only the costs that were measured on idle workers.

        Raises:
            UnknownCost: if there are none.
        """
        alone = tuple(entry for entry in self.costs if entry.beside == "nothing")
        if self.collectives and not any(map(_is_dense, alone)):
            raise UnknownCost(f"network {self.name!r} was measured beside compute only")
        return replace(self, costs=alone)

    def while_idle(self) -> "Network":
        """Return the network with costs of idle workers wherever both kinds were measured."""
        # Of two for one operation, collective and number of workers the last stays.
        by_beside = sorted(self.costs, key=_is_beside_compute, reverse=True)
        kept = {(cost.operation, cost.collective, cost.workers): cost for cost in by_beside}
        return replace(self, costs=tuple(cost for cost in self.costs if cost in kept.values()))

    def cost(
        self,
        operation: Operation,
        collective: str,
        *,
        workers: int,
        compression: Compression | None = None,
    ) -> Cost:
        """Return a function of the message's size in bytes: ``Network.cost(…).seconds(nbytes)``.

        For a compressed message ``nbytes`` is its size before compression, in float32.

        Args:
            operation: "all-reduce", "broadcast", "reduce", "reduce-scatter" or "all-gather".
            collective: the algorithm, such as "native" or "ring".
            workers: how many workers there are.
            compression: how an all-reduce is rounded or thinned out, if it is.

        Raises:
            RequestError: if there is no such operation, or no worker.
            UnknownCost: if the network cannot price this.
        """
        if operation not in OPERATIONS:
            others = alternatives(str(operation), OPERATIONS)
            raise RequestError(f"no operation {operation!r}{others}")
        if workers < 1:
            raise RequestError(f"workers must be at least 1, got {workers}")
        if operation == "all-reduce":
            phases = self.phases(collective, workers=workers, compression=compression)
            costs = tuple(cost for _, cost in phases)
            return costs[0] if len(costs) == 1 else _total(costs)
        if compression is not None:
            raise UnknownCost(f"{compression} thins out an all-reduce, not a {operation}")
        return self._dense_cost(operation, collective, workers)

    def phases(
        self, collective: str, *, workers: int, compression: Compression | None = None
    ) -> tuple[tuple[str, Cost], ...]:
        """Return the operations of one gradient message and their costs, in their order.

        That is an all-reduce; by parameter servers a push and a pull; of the largest elements alone
        their selection and their exchange.

        Raises:
            UnknownCost: if the network cannot price one of them.
        """
        is_whole = self._measured("all-reduce", collective) or not _has_servers(collective)
        if compression is not None and compression.rounding is not None:
            cost = self._rounded_cost(Travel(collective, compression), workers)
            return ((f"{compression} all-reduce", cost),)
        if compression is not None:
            self._check_known(collective)
            exchange = (str(compression), self._sparse_cost(compression, workers))
            if self.selection_s_per_element == 0 or workers == 1:
                return (exchange,)
            return (("select", selection(self.selection_s_per_element)), exchange)
        if is_whole:
            return (("all-reduce", self._dense_cost("all-reduce", collective, workers)),)
        return (
            ("push", self._dense_cost("reduce", collective, workers)),
            ("pull", self._dense_cost("broadcast", collective, workers)),
        )

    def seconds(
        self, operation: Operation, collective: str, *, nbytes: float, workers: int
    ) -> float:
        """Return the seconds that one message of ``nbytes`` bytes takes.

        Raises:
            RequestError: if there is no such operation, or no worker.
            UnknownCost: if the network cannot price this.
        """
        return float(self.cost(operation, collective, workers=workers).seconds(float(nbytes)))

    def latency_s(
        self,
        collective: str,
        *,
        workers: int,
        operation: Operation = "all-reduce",
        compression: Compression | None = None,
    ) -> float:
        """Return the seconds between the moment when the next message may leave and this arrives.

        Messages that follow each other closely overlap by so much. It is 0 where nothing was
        measured.
        """
        entry = self._entries(operation, collective).get(workers)
        if compression is not None:
            # A sparse exchange is another algorithm, whose own start-up has all of it.
            otherwise = None if compression.rounding is None else entry
            compressed = self._entries(operation, str(Travel(collective, compression)))
            entry = compressed.get(workers, otherwise)
        return 0.0 if entry is None else entry.latency_s

    @property
    def default_collective(self) -> str:
        """The collective that messages take unless they are told otherwise."""
        return self.default_for("all-reduce")

    def default_for(self, *operations: Operation) -> str:
        """Return the first collective that all of these were measured or fitted with.

        Without one it is the ring.
        """
        of_all = (n for n in self.collectives if all(self._entries(op, n) for op in operations))
        return next(of_all, "ring")

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives that were measured or fitted with whole gradients as they are."""
        return tuple(dict.fromkeys(entry.collective for entry in self.costs if _is_dense(entry)))

    @property
    def travels(self) -> tuple[Travel, ...]:
        """Pairs of collective and rounding for which costs were measured or fitted."""
        whole = (entry.collective for entry in self.costs if not _is_sparse(entry))
        return tuple(map(parse_travel, dict.fromkeys(whole)))

    @property
    def known_workers(self) -> tuple[int, ...]:
        """The numbers of workers it was measured or fitted with; links may know any other."""
        return tuple(sorted({entry.workers for entry in self.costs}))

    def _measured(self, operation: Operation, collective: str) -> dict[int, Cost]:
        """Return costs that are known without links, by number of workers."""
        return {count: entry.cost for count, entry in self._entries(operation, collective).items()}

    def _entries(self, operation: Operation, collective: str) -> dict[int, CollectiveCost]:
        asked = (
            entry
            for entry in self.costs
            if (entry.operation, entry.collective) == (operation, collective)
        )
        # Of two for one number of workers the last stays: the one beside compute.
        return {entry.workers: entry for entry in sorted(asked, key=_is_beside_compute)}

    def _dense_cost(self, operation: Operation, collective: str, workers: int) -> Cost:
        measured = self._measured(operation, collective)
        if workers in measured:
            return measured[workers]
        if measured and (self.links is None or not has_formula(operation, collective)):
            if workers == 1:
                return FREE
            counts = ", ".join(str(count) for count in sorted(measured))
            raise UnknownCost(
                f"network {self.name!r} knows {_what(operation, collective)} for {counts} "
                f"workers, not for {workers}; `gradweave calibrate` on as many ranks would tell"
            )
        if self.links is None:
            known = sorted({_what(entry.operation, entry.collective) for entry in self.costs})
            raise UnknownCost(
                f"network {self.name!r} does not know {_what(operation, collective)}; "
                f"it knows {', '.join(known)}"
            )
        # Priced for two at least, so that a wrong name is found with one worker too.
        formula = closed_form(operation, collective, self.links, max(2, workers))
        return FREE if workers == 1 else formula

    def _rounded_cost(self, travel: Travel, workers: int) -> Cost:
        """Return what was measured, or what sending fewer bytes would cost.

        That is by the same collective, or by the default one where nothing is known of it.
        """
        measured = self._measured("all-reduce", str(travel))
        if workers in measured:
            return measured[workers]
        assert travel.compression is not None
        is_known = self.links is not None or self._measured("all-reduce", travel.collective)
        by = travel.collective if is_known else self.default_collective
        dense = self._dense_cost("all-reduce", by, workers)
        share = Share(dense, travel.compression.wire_share)
        return share.line(0.0) if isinstance(dense, Line) else share

    def _sparse_cost(self, compression: Compression, workers: int) -> Cost:
        measured = self._measured("all-reduce", str(compression))
        if workers in measured:
            return measured[workers]
        if self.links is None:
            raise UnknownCost(
                f"network {self.name!r} has no links, so the exchange of {compression} has no "
                "price; take a network with links"
            )
        if workers == 1:
            return FREE
        return sparse_closed_form(compression, self.links, workers)

    def _check_known(self, collective: str) -> None:
        """Raise unless there is such a collective, also where its price is not asked for."""
        if not self._measured("all-reduce", collective):
            self._dense_cost("all-reduce", collective, 1)


def _total(costs: tuple[Cost, ...]) -> Cost:
    """Add costs up; if all are lines the sum is a line, for which planning is faster."""
    lines = [cost for cost in costs if isinstance(cost, Line)]
    if len(lines) < len(costs):
        return Total(costs)
    return total_line(*lines)


def _is_dense(entry: CollectiveCost) -> bool:
    return not _is_sparse(entry) and parse_travel(entry.collective).compression is None


def _is_sparse(entry: CollectiveCost) -> bool:
    return parse_spec(entry.collective).name in EXCHANGE_NAMES


def _is_beside_compute(entry: CollectiveCost) -> bool:
    return entry.beside == "compute"


def _has_servers(collective: str) -> bool:
    return parse_spec(collective).name == "parameter-server"


def _numbers(startup_s: float | None, s_per_byte: float | None) -> dict[str, object]:
    """Return the columns of a line or a link, with those of a measured point left empty."""
    return {"nbytes": None, "seconds": None, "startup_s": startup_s, "s_per_byte": s_per_byte}


def _link_text(level: Level) -> str:
    link = level.link
    rate = f"{size_text(1 / link.s_per_byte)}/s" if link.s_per_byte else "any rate"
    return f"{time_text(link.latency_s)} and {rate}"


def _what(operation: str, collective: str) -> str:
    return f"{operation} by {collective!r}"

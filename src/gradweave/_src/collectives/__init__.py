"""Collectives are data here. A new algorithm is one file and one line in ``ALGORITHMS``.

Schedules are written for ranks 0 to N-1 with root 0; ``build`` gives the parts to the real ranks in
an order that follows the network, so that a ring or a chain enters and leaves each host once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import get_args

import numpy as np

from gradweave._src.collectives import (
    blueconnect,
    doubling,
    exchange,
    halving,
    mst,
    parameter_server,
    pat,
    pipeline,
    ring,
    tree,
    two_level,
)
from gradweave._src.collectives.alike import Stage
from gradweave._src.collectives.program import program
from gradweave._src.collectives.schedule import Schedule, renamed
from gradweave._src.collectives.topology import Topology
from gradweave._src.costs import GIGABIT_ETHERNET, Link, closed_form, flat
from gradweave._src.costs.pipeline import PipelineCost
from gradweave._src.costs.scatter_gather import rounds
from gradweave._src.errors import RequestError
from gradweave._src.travel import Travel, parse_travel
from gradweave._src.vocabulary import (
    MIB,
    Operation,
    Spec,
    Way,
    alternatives,
    parse_servers,
    parse_spec,
    parse_tiers,
    refuse_argument,
)

__all__ = [
    "ALGORITHMS",
    "OWNED",
    "SUMMARIES",
    "TIERS",
    "Request",
    "build",
    "is_schedule",
    "names",
    "operations_of",
    "stages_of",
    "sums_copies",
    "ways",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an algorithm may want to know before it writes its schedule."""

    operation: Operation
    topology: Topology
    nbytes: int
    link: Link  # what a transfer costs, for algorithms that choose a block size
    spec: Spec  # the algorithm's name, and its argument

    @property
    def ranks(self) -> int:
        return self.topology.ranks


Algorithm = Callable[[Request], Schedule]

# Start-ups matter if they take more than this share of the time that the bytes take.
LATENCY_MATTERS = 0.05


def _plain(build_for: Callable[[int], Schedule]) -> Algorithm:
    def algorithm(request: Request) -> Schedule:
        refuse_argument(request.spec)
        return build_for(request.ranks)

    return algorithm


def _pipelined(build_for: Callable[[int, int], Schedule]) -> Algorithm:
    """Send in blocks whose size the cost model chooses, or which stands behind the colon."""

    def algorithm(request: Request) -> Schedule:
        ranks = max(2, request.ranks)
        cost = closed_form(request.operation, str(request.spec), flat(request.link), ranks)
        assert isinstance(cost, PipelineCost)
        return build_for(request.ranks, int(cost.blocks(np.array([float(request.nbytes)]))[0]))

    return algorithm


def _served(build_for: Callable[[int, int], Schedule]) -> Algorithm:
    return lambda request: build_for(request.ranks, parse_servers(request.spec, request.ranks))


def _blueconnect(request: Request) -> Schedule:
    factors, order = request.topology.factors, request.topology.order
    tiers = _tiers_of(factors, nbytes=request.nbytes, link=request.link, spec=request.spec)
    match request.operation:
        case "reduce-scatter":
            return blueconnect.reduce_scatter(factors, order, tiers)
        case "all-gather":
            return blueconnect.all_gather(factors, order, tiers)
    return blueconnect.all_reduce(factors, tiers)


def _tiers_of(
    factors: Sequence[int], *, nbytes: int, link: Link, spec: Spec
) -> list[blueconnect.Tier]:
    """Return how each tier reduce-scatters and all-gathers, innermost first.

    ``blueconnect`` leaves that to us, ``blueconnect:ring/halving-doubling`` names one for each
    tier, and ``blueconnect:pat`` one for all of them.
    """
    if spec.argument is None:
        return _tiers_for(factors, nbytes, link)
    named = parse_tiers(spec.argument, len(factors))
    if len(named) != len(factors) or not set(named) <= set(TIERS):
        raise RequestError(
            f"{spec}: expected {len(factors)} of {', '.join(TIERS)}, "
            f"separated by slashes, for tiers of {factors}"
        )
    return [TIERS[name] for name in named]


def _tiers_for(factors: Sequence[int], nbytes: int, link: Link) -> list[blueconnect.Tier]:
    """Choose halving for powers of two whose fewer rounds matter, else the ring.

    A ring is preferred because its connections stay busy, and so up to speed.
    """
    chosen, part_bytes = [], nbytes
    for size in factors:
        spared_s = (size - 1 - rounds(size)) * link.latency_s
        matters = spared_s > LATENCY_MATTERS * part_bytes * link.s_per_byte
        chosen.append(blueconnect.best_tier(size) if matters else blueconnect.RING)
        part_bytes //= size
    return chosen


def _two_level(request: Request) -> Schedule:
    refuse_argument(request.spec)
    local, *outer = request.topology.factors
    if not outer:
        return _plain(ring.all_reduce)(request)
    return two_level.all_reduce(local, request.ranks // local)


TIERS: Mapping[str, blueconnect.Tier] = {
    "ring": blueconnect.RING,
    "halving-doubling": blueconnect.HALVING,
    "pat": blueconnect.PAT,
}

ALGORITHMS: Mapping[tuple[Operation, str], Algorithm] = {
    ("all-reduce", "ring"): _plain(ring.all_reduce),
    ("all-reduce", "binary-tree"): _plain(tree.all_reduce),
    ("all-reduce", "recursive-doubling"): _plain(doubling.all_reduce),
    ("all-reduce", "halving-doubling"): _plain(halving.all_reduce),
    ("all-reduce", "pat"): _plain(pat.all_reduce),
    ("all-reduce", "double-tree"): _plain(tree.double_all_reduce),
    ("all-reduce", "linear-pipeline"): _pipelined(pipeline.all_reduce),
    ("all-reduce", "mst"): _plain(mst.all_reduce),
    ("all-reduce", "exchange"): _plain(exchange.all_reduce),
    ("all-reduce", "two-level"): _two_level,
    ("all-reduce", "blueconnect"): _blueconnect,
    ("all-reduce", "parameter-server"): _served(parameter_server.all_reduce),
    ("broadcast", "linear-pipeline"): _pipelined(pipeline.broadcast),
    ("broadcast", "mst"): _plain(mst.broadcast),
    ("broadcast", "exchange"): _plain(exchange.broadcast),
    ("reduce", "linear-pipeline"): _pipelined(pipeline.reduce),
    ("reduce", "mst"): _plain(mst.reduce),
    ("reduce", "exchange"): _plain(exchange.reduce),
    ("reduce-scatter", "ring"): _plain(ring.reduce_scatter),
    ("reduce-scatter", "halving-doubling"): _plain(halving.reduce_scatter),
    ("reduce-scatter", "pat"): _plain(pat.reduce_scatter),
    ("reduce-scatter", "blueconnect"): _blueconnect,
    ("all-gather", "ring"): _plain(ring.all_gather),
    ("all-gather", "halving-doubling"): _plain(halving.all_gather),
    ("all-gather", "pat"): _plain(pat.all_gather),
    ("all-gather", "blueconnect"): _blueconnect,
}

# How a message of N ranks travels, in one line for people.
SUMMARIES: Mapping[str, str] = {
    "native": "the backend's own, such as gloo's",
    "ring": "every rank sends to the next one, 1/N of the message in each round",
    "binary-tree": "up to the root and down again, the whole message in every round",
    "recursive-doubling": "partners swap all they have: log N rounds, for small messages",
    "halving-doubling": "the ring's bytes in log N rounds",
    "pat": "the ring's bytes in log N rounds for any N, by trees of all ranks at once, as NCCL's",
    "double-tree": "each half of the message through a tree of its own, in chunks",
    "linear-pipeline": "blocks along a chain; linear-pipeline:64KiB names their size",
    "mst": "a minimum spanning tree: who has the message passes it on",
    "exchange": "scattered first, so that everybody can help with long messages",
    "two-level": "one master on each node speaks for it",
    "blueconnect": "tier by tier on ever smaller parts, for nodes of several ranks",
    "parameter-server": "all push to one rank and pull; parameter-server:4 has four of them",
}

# Operations in which block b belongs to rank b, whatever the network looks like.
OWNED: frozenset[Operation] = frozenset({"reduce-scatter", "all-gather"})


def names(operation: Operation) -> list[str]:
    return [name for known, name in ALGORITHMS if known == operation]


def operations_of(collective: str) -> list[Operation]:
    """Return the operations that a collective has; the backend's own has all."""
    if collective == "native":
        return list(get_args(Operation))
    return [operation for operation, name in ALGORITHMS if name == collective]


def ways(operations: Sequence[Operation], algorithms: Sequence[str]) -> tuple[Way, ...]:
    """Return every operation by every algorithm that has it; the backend's own has all.

    Rounded ways, such as ``ring+bf16``, have all-reduces only.
    """
    return tuple(
        Way(operation, algorithm)
        for operation, algorithm in product(operations, algorithms)
        if _has(operation, parse_travel(algorithm))
    )


def _has(operation: Operation, travel: Travel) -> bool:
    by = parse_spec(travel.collective).name
    is_rounded = travel.compression is not None
    return by in {"native", *names(operation)} and (operation == "all-reduce" or not is_rounded)


def build(
    operation: Operation,
    collective: str,
    *,
    topology: Topology,
    nbytes: int,
    link: Link,
    root: int = 0,
) -> Schedule:
    """Return the schedule of an operation on a message of that many bytes."""
    spec = parse_spec(collective)
    if (operation, spec.name) not in ALGORITHMS:
        known = alternatives(spec.name, names(operation))
        raise RequestError(f"no {operation} by {collective!r}{known}")
    if not 0 <= root < topology.ranks:
        raise RequestError(f"root must be one of {topology.ranks} ranks, got {root}")
    schedule = ALGORITHMS[operation, spec.name](
        Request(operation=operation, topology=topology, nbytes=nbytes, link=link, spec=spec)
    )
    if operation in OWNED:
        return schedule
    order = np.array(topology.order)
    if operation in {"broadcast", "reduce"}:
        order = topology.beginning_with(root)
    return renamed(schedule, order)


def stages_of(
    operation: Operation, collective: str, *, factors: Sequence[int], nbytes: int, link: Link
) -> list[Stage]:
    """Return what ``build`` does, but written down once for all ranks, which all do the same.

    Ranks are numbered with the innermost of ``factors`` fastest.
    """
    spec = parse_spec(collective)
    if (operation, spec.name) not in ALGORITHMS or spec.name not in {*TIERS, "blueconnect"}:
        raise RequestError(
            f"{operation} by {collective!r} is not written down once for all ranks; take "
            f"{', '.join(TIERS)} or blueconnect"
        )
    if spec.name == "blueconnect":
        tiers = _tiers_of(factors, nbytes=nbytes, link=link, spec=spec)
        inwards, outwards = blueconnect.stages(factors, tiers)
    else:
        refuse_argument(spec)
        inwards, outwards = blueconnect.stages([prod(factors)], [TIERS[spec.name]])
    match operation:
        case "reduce-scatter":
            return inwards
        case "all-gather":
            return outwards
    return [*inwards, *outwards]


def is_schedule(collective: str) -> bool:
    """Return whether it runs as one of ours: not by the backend, nor by groups for its tiers."""
    name, argument = parse_spec(collective)
    tiers = set((argument or "").split("/"))
    return name != "native" and not (name == "blueconnect" and tiers & {"auto", "native"})


def sums_copies(collective: str, topology: Topology) -> bool:
    """Return whether several ranks make the same sums, from the same parts, in its all-reduces."""
    schedule = build("all-reduce", collective, topology=topology, nbytes=MIB, link=GIGABIT_ETHERNET)
    return program(schedule, 0).sums_copies

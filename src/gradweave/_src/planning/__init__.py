"""Deciding which gradients to merge. A new planner is one function and one line in ``PLANNERS``."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gradweave._src.checks import require_kind
from gradweave._src.compression import Compression, compression_of
from gradweave._src.costs import Cost, Line, Share, Total
from gradweave._src.errors import RequestError, UnknownCost
from gradweave._src.network import Network
from gradweave._src.plan import Plan, merge
from gradweave._src.planning import baselines
from gradweave._src.planning.both_passes import optimal_for_both
from gradweave._src.planning.mgwfbp import mgwfbp
from gradweave._src.planning.optimal import DEFAULT_TOLERANCE, optimal
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import (
    Operation,
    Passes,
    Spec,
    alternatives,
    parse_bytes,
    parse_spec,
    refuse_argument,
)

__all__ = [
    "BOTH_PASSES_COLLECTIVE",
    "FOR_ROUNDED",
    "FOR_SMALL_MESSAGES",
    "FOR_TIERS",
    "OPERATIONS",
    "PLANNERS",
    "Merging",
    "Planner",
    "at_share",
    "find_planner",
    "is_compressible",
    "make_plan",
    "planner_summary",
    "priced_share",
]

# What a plan's messages do, by the passes beside which they travel.
OPERATIONS: Mapping[Passes, tuple[Operation, ...]] = {
    "backward": ("all-reduce",),
    "both": ("reduce-scatter", "all-gather"),
}

# gloo's own reduce-scatter is far from what links allow, so by default both halves of a message go
# by ours.
BOTH_PASSES_COLLECTIVE = "ring"

# Collectives that wrappers try beside the backend's own: one with few start-ups, one for links in
# tiers, and one for rounded messages.
FOR_SMALL_MESSAGES, FOR_TIERS, FOR_ROUNDED = "recursive-doubling", "blueconnect", "ring"

# Bytes of a float32 element: the only width that rounding is priced for, and what a sparse message
# carries for each.
COMPRESSIBLE_BYTES = 4
# Widths of gradients that sparse messages carry in float32.
SPARSE_BYTES = (2, COMPRESSIBLE_BYTES)

# Nobody wants fewer messages at the price of more than twice the optimum.
LARGEST_TOLERANCE = 1.0

# These planners send nothing while anything is computed.
WITHOUT_OVERLAP = frozenset({"naive"})

# A function that says how many tensors each message takes, in backward order, where a message costs
# that much.
Merging = Callable[[Trace, Cost], list[int]]
# The same where its two halves, reduce-scatter and all-gather, cost that much.
MergingForBoth = Callable[[Trace, Cost, Cost], list[int]]


class Planner(NamedTuple):
    """How gradients are merged, from a name and what stands behind its colon.

    ``summary`` says in one line what becomes of gradients. ``example`` is what may stand behind the
    colon.
    """

    merging: Callable[[Spec], Merging]
    summary: str | Callable[[Spec], str]
    example: str | None = None


def _plain(merging: Merging) -> Callable[[Spec], Merging]:
    def without_argument(spec: Spec) -> Merging:
        refuse_argument(spec)
        return merging

    return without_argument


def _fixed(spec: Spec) -> Merging:
    """Merge until a bucket has the given size, as in ``fixed:25MiB``."""
    if spec.argument is None:
        raise RequestError("planner 'fixed' needs a size, such as fixed:25MiB")
    nbytes = parse_bytes(spec.argument)
    return lambda trace, _: baselines.at_least(trace, nbytes)


def _inductor(spec: Spec) -> Merging:
    """Return the compiler's merging, with its own cap or that of ``inductor:25MiB``."""
    if spec.argument is None:
        return lambda trace, _: baselines.inductor(trace)
    nbytes = parse_bytes(spec.argument)
    return lambda trace, _: baselines.inductor(trace, nbytes)


def _optimal(spec: Spec) -> Merging:
    tolerance = _tolerance(spec)
    return lambda trace, cost: optimal(trace, cost, tolerance=tolerance)


def _optimal_for_both(spec: Spec) -> MergingForBoth:
    tolerance = _tolerance(spec)
    return lambda trace, *halves: optimal_for_both(trace, *halves, tolerance=tolerance)


def _tolerance(spec: Spec) -> float:
    """Return the tolerance of ``optimal:0.05``, or the default of ``optimal``."""
    try:
        tolerance = DEFAULT_TOLERANCE if spec.argument is None else float(spec.argument)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance <= LARGEST_TOLERANCE:
        raise RequestError(
            f"optimal takes a tolerance from 0 to 1, such as optimal:0.01, got {spec.argument!r}"
        )
    return tolerance


def _until_full(spec: Spec) -> str:
    return f"a message closes once it holds {spec.argument or 'the size behind its colon'}"


def _within_tolerance(spec: Spec) -> str:
    tolerance = _tolerance(spec)
    if tolerance == 0:
        return "the optimum itself, by Gradweave's exact planner"
    return (
        f"the fewest messages within {100 * tolerance:g} % of the optimum, by Gradweave's exact "
        "planner"
    )


PLANNERS: Mapping[str, Planner] = {
    "ddp": Planner(
        _plain(baselines.torch_default), "as torch's DDP does: a message of 1 MiB, then of 25 MiB"
    ),
    "optimal": Planner(_optimal, _within_tolerance, "0.05"),
    "wfbp": Planner(
        _plain(baselines.one_per_tensor), "each gradient by itself, as soon as it is ready"
    ),
    "single": Planner(
        _plain(baselines.all_in_one), "all gradients in one message, when backward has ended"
    ),
    "fixed": Planner(_fixed, _until_full, "25MiB"),
    "mgwfbp": Planner(_plain(mgwfbp), "merged by the rule of the MG-WFBP papers"),
    "inductor": Planner(
        _inductor, "as torch's compiler does: as many gradients as fit into 2000 MiB", "25MiB"
    ),
    "naive": Planner(
        _plain(baselines.one_per_tensor), "each gradient by itself, after backward has ended"
    ),
}

# These look at each half of a message; the others merge for both passes as if it travelled at once.
PLANNERS_FOR_BOTH: Mapping[str, Callable[[Spec], MergingForBoth]] = {
    "optimal": _optimal_for_both,
}


def find_planner(name: str) -> Merging:
    spec = parse_spec(name)
    if spec.name not in PLANNERS:
        raise RequestError(f"no planner {spec.name!r}{alternatives(spec.name, PLANNERS)}")
    return PLANNERS[spec.name].merging(spec)


def planner_summary(name: str) -> str:
    """Say in one line what a planner, such as ``optimal:0.05``, does with gradients."""
    spec = parse_spec(name)
    summary = PLANNERS[spec.name].summary
    return summary if isinstance(summary, str) else summary(spec)


def make_plan(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str = "optimal",
    collective: str | None = None,
    compression: Compression | str | None = None,
    passes: Passes = "backward",
) -> Plan:
    """Merge the trace's gradients for all-reduce, or push and pull, over this network.

    Args:
        trace: which gradients there are, and when each is ready.
        network: what messages cost.
        workers: how many workers there are.
        planner: how to merge, as `gradweave list planners` names them.
        collective: by which messages travel (default: what the network was measured with).
        compression: a Compression, or a text such as ``gtopk:0.001`` or ``bf16``.
        passes: ``backward``, or ``both``: reduce-scatters beside backward, and all-gathers of the
            same buckets beside the next forward.

    Raises:
        RequestError: if a name means nothing, or gradients of this width cannot be compressed.
        UnknownCost: if the network cannot price what is asked for.

    Examples:
        >>> trace, network = gradweave.load_trace("resnet50"), gradweave.load_network("k80-10gbe")
        >>> plan = gradweave.make_plan(trace, network, workers=16)
        >>> plan.planner, sum(plan.lengths)
        ('optimal', 161)
    """
    require_kind("make_plan(trace, network, …)", trace=(trace, Trace), network=(network, Network))
    compression = compression_of(compression)
    if passes not in OPERATIONS:
        raise RequestError(f"no passes {passes!r}{alternatives(passes, OPERATIONS)}")
    share = priced_share(trace, compression)
    by = collective or default_collective(network, compression=compression, passes=passes)
    known = _costs(network, by, workers=workers, compression=compression, passes=passes)
    costs = [at_share(cost, share) for cost in known]
    return merge(
        trace,
        _lengths(trace, costs, planner),
        planner=planner,
        collective=by,
        compression=compression,
        overlap=parse_spec(planner).name not in WITHOUT_OVERLAP,
        passes=passes,
    )


def default_collective(
    network: Network, *, compression: Compression | None = None, passes: Passes = "backward"
) -> str:
    """Return the collective that is used by default; rounded messages need one of ours."""
    if compression is not None and compression.rounding is not None:
        return FOR_ROUNDED
    return network.default_for(*OPERATIONS[passes])


def is_compressible(trace: Trace) -> bool:
    """Return whether its gradients are float32, which rounding has prices for."""
    return all(tensor.bytes_per_element == COMPRESSIBLE_BYTES for tensor in trace.tensors)


def priced_share(trace: Trace, compression: Compression | None) -> float:
    """Return the factor between the bytes of gradients and the bytes for which costs are given.

    Prices of compressed messages are over gradients of 4 bytes. A sparse one carries 4 bytes for
    each gradient that it sends, also where gradients have 2: it costs what a message of twice the
    bytes would.
    """
    if compression is None:
        return 1.0
    widths = {tensor.bytes_per_element for tensor in trace.tensors}
    if compression.rounding is not None:
        if widths != {COMPRESSIBLE_BYTES}:
            raise RequestError(f"{compression} is priced for gradients of 4 bytes only")
        return 1.0
    if len(widths) > 1 or not widths <= set(SPARSE_BYTES):
        found = " and ".join(map(str, sorted(widths)))
        raise RequestError(
            f"{compression} is priced for gradients that all have 2 or all have 4 bytes, "
            f"got {found}"
        )
    return COMPRESSIBLE_BYTES / widths.pop()


def at_share(cost: Cost, share: float) -> Cost:
    """Return the cost of gradients whose messages cost what ``share`` times their bytes would."""
    if share == 1:
        return cost
    scaled = Share(cost, share)
    return scaled.line(0.0) if isinstance(cost, Line) else scaled


def _costs(
    network: Network,
    collective: str,
    *,
    workers: int,
    compression: Compression | None,
    passes: Passes,
) -> list[Cost]:
    try:
        return [
            network.cost(operation, collective, workers=workers, compression=compression)
            for operation in OPERATIONS[passes]
        ]
    except UnknownCost as error:
        if passes == "backward" or compression is not None:
            raise
        both = ",".join(OPERATIONS["both"])
        raise UnknownCost(
            f"{error}; plans for both passes need {both}: calibrate with --op all-reduce,{both}, "
            "or take ring on a network with links"
        ) from None


def _lengths(trace: Trace, costs: list[Cost], planner: str) -> list[int]:
    merging = find_planner(planner)
    match costs:
        case [cost]:
            return merging(trace, cost)
        case halves:
            spec = parse_spec(planner)
            if spec.name in PLANNERS_FOR_BOTH:
                return PLANNERS_FOR_BOTH[spec.name](spec)(trace, *halves)
            return merging(trace, Total(tuple(halves)))

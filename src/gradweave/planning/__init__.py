"""Deciding which gradients to merge. A new planner is one function and one line in ``PLANNERS``."""

from collections.abc import Callable, Mapping

from gradweave.compression import Compression
from gradweave.costs import Cost
from gradweave.errors import RequestError
from gradweave.network import Network
from gradweave.plan import Plan, merge
from gradweave.planning import baselines
from gradweave.planning.mgwfbp import mgwfbp
from gradweave.planning.optimal import DEFAULT_TOLERANCE, optimal
from gradweave.trace import Trace
from gradweave.words import Spec, parse_bytes, parse_spec, refuse_argument

__all__ = ["PLANNERS", "Merging", "find_planner", "make_plan"]

# How many tensors each message takes, in backward order, when a message costs that much.
Merging = Callable[[Trace, Cost], list[int]]


def _plain(merging: Merging) -> Callable[[Spec], Merging]:
    def without_argument(spec: Spec) -> Merging:
        refuse_argument(spec)
        return merging

    return without_argument


def _fixed(spec: Spec) -> Merging:
    """``fixed:25MiB``"""
    if spec.argument is None:
        raise RequestError("planner 'fixed' needs a size, such as fixed:25MiB")
    nbytes = parse_bytes(spec.argument)
    return lambda trace, _: baselines.at_least(trace, nbytes)


def _optimal(spec: Spec) -> Merging:
    """``optimal``, or ``optimal:0.05`` for another tolerance."""
    try:
        tolerance = DEFAULT_TOLERANCE if spec.argument is None else float(spec.argument)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance <= LARGEST_TOLERANCE:
        raise RequestError(
            f"optimal takes a tolerance from 0 to 1, such as optimal:0.01, got {spec.argument!r}"
        )
    return lambda trace, cost: optimal(trace, cost, tolerance=tolerance)


PLANNERS: Mapping[str, Callable[[Spec], Merging]] = {
    "naive": _plain(baselines.one_per_tensor),
    "wfbp": _plain(baselines.one_per_tensor),
    "single": _plain(baselines.all_in_one),
    "fixed": _fixed,
    "ddp": _plain(baselines.torch_default),
    "mgwfbp": _plain(mgwfbp),
    "optimal": _optimal,
}

# Beyond twice the optimum nobody wants fewer messages.
LARGEST_TOLERANCE = 1.0

# These send nothing before backward has ended.
WITHOUT_OVERLAP = frozenset({"naive"})


def find_planner(name: str) -> Merging:
    spec = parse_spec(name)
    if spec.name not in PLANNERS:
        raise RequestError(f"no planner {spec.name!r}; there are {', '.join(PLANNERS)}")
    return PLANNERS[spec.name](spec)


def make_plan(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str = "optimal",
    collective: str | None = None,
    compression: Compression | None = None,
) -> Plan:
    """Merge the trace's gradients for all-reduce, or push and pull, over this network."""
    if compression is not None and {tensor.bytes_per_element for tensor in trace.tensors} != {4}:
        raise RequestError(f"{compression} is priced for gradients of 4 bytes only")
    by = collective or network.default_collective
    cost = network.cost("all-reduce", by, workers=workers, compression=compression)
    return merge(
        trace,
        find_planner(planner)(trace, cost),
        planner=planner,
        collective=by,
        compression=compression,
        overlap=parse_spec(planner).name not in WITHOUT_OVERLAP,
    )

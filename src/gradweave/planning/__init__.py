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
from gradweave.words import parse_bytes, parse_spec, refuse_argument

__all__ = ["PLANNERS", "Merging", "find_planner", "make_plan"]

# How many tensors each message takes, in backward order, when a message costs that much.
Merging = Callable[[Trace, Cost], list[int]]


def _plain(merging: Merging) -> Callable[[str | None], Merging]:
    def without_argument(argument: str | None) -> Merging:
        refuse_argument(argument)
        return merging

    return without_argument


def _fixed(argument: str | None) -> Merging:
    """``fixed:25MiB``"""
    if argument is None:
        raise RequestError("planner 'fixed' needs a size, such as fixed:25MiB")
    nbytes = parse_bytes(argument)
    return lambda trace, _: baselines.up_to(trace, nbytes)


def _optimal(argument: str | None) -> Merging:
    """``optimal``, or ``optimal:0.05`` for another tolerance."""
    try:
        tolerance = DEFAULT_TOLERANCE if argument is None else float(argument)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < float("inf"):
        raise RequestError(
            f"optimal takes a tolerance >= 0, such as optimal:0.01, got {argument!r}"
        )
    return lambda trace, cost: optimal(trace, cost, tolerance=tolerance)


PLANNERS: Mapping[str, Callable[[str | None], Merging]] = {
    "naive": _plain(baselines.one_per_tensor),
    "wfbp": _plain(baselines.one_per_tensor),
    "single": _plain(baselines.all_in_one),
    "fixed": _fixed,
    "ddp": _plain(baselines.torch_default),
    "mgwfbp": _plain(mgwfbp),
    "optimal": _optimal,
}

# These send nothing before backward has ended.
WITHOUT_OVERLAP = frozenset({"naive"})


def find_planner(name: str) -> Merging:
    spec = parse_spec(name)
    if spec.name not in PLANNERS:
        raise RequestError(f"no planner {spec.name!r}; there are {', '.join(PLANNERS)}")
    return PLANNERS[spec.name](spec.argument)


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

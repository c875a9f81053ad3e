"""The plans worth trying: what the model of the network holds best, and what goes without one."""

from collections.abc import Sequence
from itertools import chain, repeat

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.compression import Compression
from gradweave._src.network import Network
from gradweave._src.plan import Bucket, Plan, merge
from gradweave._src.planning import make_plan
from gradweave._src.planning.baselines import UNIFORM_MIB, closed_at
from gradweave._src.planning.joint import plan_among
from gradweave._src.session.task import PlanningTask
from gradweave._src.simulation import simulate
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel, parse_travel
from gradweave._src.vocabulary import Passes

# Plans with fewer messages than the optimum, predicted slower by at most so much, are candidates,
# too: what a message costs may be learnt wrongly.
TOLERANCES = (0.05, 0.25)
# Another way than the backend's own must be better by this share: it runs on our thread.
WORTH_A_THREAD = 0.10


class Candidate(Struct, frozen=True, kw_only=True):
    """A plan that may be tried; ``Trial.candidate`` is one.

    Attributes:
        plan: the plan.
        predicted_s: predicted seconds of an iteration with it.
        is_baseline: whether this is what would be sent without planning.
    """

    plan: Plan
    predicted_s: float
    is_baseline: bool = False


def shortlist(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str,
    travels: tuple[Travel, ...],
    baseline_lengths: list[int],
    passes: Passes = "backward",
) -> list[Candidate]:
    """Return the planner's plan first, the baseline last; plans with the same buckets stand once.

    ``travels`` are the ways that messages may take, the first of which they take without planning;
    ``baseline_lengths`` are how many tensors each bucket would hold without planning.
    """

    def planned(name: str) -> Plan:
        if passes == "both":
            by = travels[0].collective
            return make_plan(
                trace, network, workers=workers, planner=name, collective=by, passes=passes
            )
        handicap = WORTH_A_THREAD if travels[0].compression is None else 0.0
        return plan_among(trace, network, travels, workers=workers, planner=name, handicap=handicap)

    def candidate(plan: Plan) -> Candidate:
        timeline = simulate(trace, plan, network, workers=workers)
        return Candidate(plan=plan, predicted_s=timeline.iteration_s)

    unplanned = merge(
        trace,
        baseline_lengths,
        planner="ddp",
        collective=travels[0].collective,
        compression=travels[0].compression,
        passes=passes,
    )
    names = [planner]
    if planner == "optimal":
        names += [f"optimal:{tolerance}" for tolerance in TOLERANCES]
    uniform = (candidate(planned(f"fixed:{size:g}MiB")) for size in UNIFORM_MIB)
    best_uniform = min(uniform, key=lambda one: one.predicted_s)
    found = [*(candidate(planned(name)) for name in names), best_uniform]
    unique: dict[tuple[Bucket, ...], Candidate] = {}
    for one in found:
        unique.setdefault(one.plan.buckets, one)
    baseline = candidate(unplanned)
    unique.pop(baseline.plan.buckets, None)
    return [*unique.values(), replace(baseline, is_baseline=True)]


def travels_for(
    task: PlanningTask, network: Network, compression: Compression | None
) -> tuple[Travel, ...]:
    """Return the ways that messages may take: measured ones, and roundings that may be tried.

    A rounding that no message has taken yet is expected to differ by its fewer bytes alone; when it
    is tried, its messages tell. Where nothing is tried, only measured ways are returned. With
    ``compression`` that is the only way, unless it may be mixed with dense messages.
    """
    if compression is not None:
        first = network.travels[0].collective
        thinned_out = Travel(first, compression)
        return (thinned_out, Travel(first)) if task.mixes_dense else (thinned_out,)
    untried = map(parse_travel, task.roundings if task.trial_steps else ())
    return tuple(dict.fromkeys([*network.travels, *untried]))


def unplanned_lengths(
    sizes: Sequence[int], *, caps_bytes: tuple[int, int], is_declared: bool
) -> list[int]:
    """Return how many of these tensors torch puts into each bucket; the first has its own cap.

    Where torch keeps the order of declaration, it fills buckets from the first parameter on and
    sends the last bucket first. The sizes are in reversed declaration order then.
    """
    order = -1 if is_declared else 1
    first, others = caps_bytes
    return closed_at(sizes[::order], chain([first], repeat(others)))[::order]

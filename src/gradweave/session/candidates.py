"""The plans worth trying: what the model of the network holds best, and what goes without one."""

from collections.abc import Sequence
from itertools import chain, repeat

from msgspec import Struct
from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.costs.cost import FloatArray
from gradweave.network import Network
from gradweave.plan import Bucket, Plan, merge
from gradweave.planning import make_plan
from gradweave.planning.baselines import closed_at
from gradweave.simulation import simulate
from gradweave.simulation.iteration import bucket_bytes
from gradweave.trace import Trace
from gradweave.vocabulary import MIB, Passes

# Fewer messages than the optimum, for where the model is wrong about what one costs.
TOLERANCES = (0.05, 0.25)
# What a patient user would try for `bucket_cap_mb`; the best of them by the model is a candidate.
UNIFORM_MIB = (0.5, 1, 2, 4, 6, 8, 12, 16, 25, 35, 50, 75, 100)
# Another collective than the backend's own must be better by this share: it runs on our thread.
WORTH_A_THREAD = 0.10


class Candidate(Struct, frozen=True, kw_only=True):
    plan: Plan
    predicted_s: float
    is_baseline: bool = False  # what would be sent without planning


def shortlist(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str,
    collectives: tuple[str, ...],
    baseline_lengths: list[int],
    compression: Compression | None = None,
    passes: Passes = "backward",
) -> list[Candidate]:
    """The planner's plan first, the baseline last; plans with the same buckets stand once.

    ``baseline_lengths`` are how many tensors each bucket would hold without planning.
    """

    def planned(name: str) -> Plan:
        plan = make_plan(
            trace,
            network,
            workers=workers,
            planner=name,
            collective=collectives[0],
            compression=compression,
            passes=passes,
        )
        if compression is not None or passes == "both":
            return plan
        return with_best_collectives(plan, trace, network, workers=workers, known=collectives)

    def candidate(plan: Plan) -> Candidate:
        timeline = simulate(trace, plan, network, workers=workers)
        return Candidate(plan=plan, predicted_s=timeline.iteration_s)

    unplanned = merge(
        trace,
        baseline_lengths,
        planner="ddp",
        collective=collectives[0],
        compression=compression,
        passes=passes,
    )
    names = [planner]
    if planner == "optimal":
        names += [f"optimal:{tolerance}" for tolerance in TOLERANCES]
    uniform = (candidate(planned(f"fixed:{round(size * MIB)}")) for size in UNIFORM_MIB)
    best_uniform = min(uniform, key=lambda one: one.predicted_s)
    found = [*(candidate(planned(name)) for name in names), best_uniform]
    unique = {one.plan.buckets: one for one in reversed(found)}
    baseline = candidate(unplanned)
    unique.pop(baseline.plan.buckets, None)
    return [*reversed(unique.values()), replace(baseline, is_baseline=True)]


def unplanned_lengths(
    sizes: Sequence[int], *, caps_bytes: tuple[int, int], is_declared: bool
) -> list[int]:
    """How many of these tensors torch puts into each bucket, of whose caps the first differs.

    Where it keeps the order of declaration it walks through that from its beginning, and sends the
    buckets from the last to the first; the sizes then stand in reversed declaration order.
    """
    order = -1 if is_declared else 1
    first, others = caps_bytes
    return closed_at(sizes[::order], chain([first], repeat(others)))[::order]


def with_best_collectives(
    plan: Plan, trace: Trace, network: Network, *, workers: int, known: tuple[str, ...]
) -> Plan:
    """Each bucket by the collective that is fastest for its size."""
    if len(known) == 1:
        return plan
    nbytes = bucket_bytes(trace, plan)
    seconds = {name: _seconds(network, name, workers, nbytes) for name in known}
    first, *others = known

    def best(number: int) -> str:
        rival = min(others, key=lambda name: seconds[name][number])
        is_worth_it = seconds[rival][number] < (1 - WORTH_A_THREAD) * seconds[first][number]
        return rival if is_worth_it else first

    buckets = tuple(
        Bucket(tensors=bucket.tensors, collective=best(number), compression=bucket.compression)
        for number, bucket in enumerate(plan.buckets)
    )
    return replace(plan, buckets=buckets)


def _seconds(network: Network, collective: str, workers: int, nbytes: FloatArray) -> FloatArray:
    return network.cost("all-reduce", collective, workers=workers).seconds(nbytes)

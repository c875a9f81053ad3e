"""The plans worth trying: what the model of the network holds best, and what torch would do."""

from itertools import repeat

from msgspec import Struct
from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.costs.cost import FloatArray
from gradweave.network import Network
from gradweave.plan import Bucket, Plan, merge
from gradweave.planning import make_plan
from gradweave.planning.baselines import closed_at, torch_caps
from gradweave.simulation import simulate
from gradweave.simulation.iteration import bucket_bytes
from gradweave.trace import Trace
from gradweave.words import MIB, Passes

# Fewer messages than the optimum, for where the model is wrong about what one costs.
TOLERANCES = (0.05, 0.25)
# What a patient user would try for `bucket_cap_mb`; the best of them by the model is a candidate.
UNIFORM_MIB = (0.5, 1, 2, 4, 6, 8, 12, 16, 25, 35, 50, 75, 100)
# Another collective than the backend's own must be better by this share: it runs on our thread.
WORTH_A_THREAD = 0.10


class Candidate(Struct, frozen=True, kw_only=True):
    plan: Plan
    predicted_s: float
    is_torchs: bool = False  # torch's own buckets, by torch's own rule


def shortlist(
    trace: Trace,
    network: Network,
    *,
    workers: int,
    planner: str,
    collectives: tuple[str, ...],
    torchs_lengths: list[int],
    compression: Compression | None = None,
    passes: Passes = "backward",
) -> list[Candidate]:
    """The planner's plan first, torch's last; plans with the same buckets stand once.

    ``torchs_lengths`` are how many tensors torch would put into each bucket by itself.
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

    torchs_own = merge(
        trace,
        torchs_lengths,
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
    torchs = candidate(torchs_own)
    unique.pop(torchs.plan.buckets, None)
    return [*reversed(unique.values()), replace(torchs, is_torchs=True)]


def torch_lengths(trace: Trace, *, bucket_cap_mb: float | None, is_declared: bool) -> list[int]:
    """How torch buckets by itself: 1 MiB and then 25 MiB, or all of one size where one is given.

    Where it keeps the order of declaration it walks through that from its beginning, and sends the
    buckets from the last to the first; the trace then stands in reversed declaration order.
    """
    order = -1 if is_declared else 1
    sizes = [tensor.nbytes for tensor in trace.tensors][::order]
    caps = torch_caps() if bucket_cap_mb is None else repeat(int(bucket_cap_mb * MIB))
    return closed_at(sizes, caps)[::order]


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

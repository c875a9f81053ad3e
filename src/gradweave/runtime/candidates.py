"""The plans worth trying: what the model of the network holds best, and what torch would do."""

from msgspec import Struct
from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.costs.cost import FloatArray
from gradweave.network import Network
from gradweave.plan import Bucket, Plan
from gradweave.planning import make_plan
from gradweave.simulation import simulate
from gradweave.simulation.iteration import bucket_bytes
from gradweave.trace import Trace
from gradweave.words import MIB

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
    compression: Compression | None = None,
) -> list[Candidate]:
    """The planner's plan first, torch's last; plans with the same buckets stand once."""

    def planned_as_is(name: str) -> Plan:
        return make_plan(
            trace,
            network,
            workers=workers,
            planner=name,
            collective=collectives[0],
            compression=compression,
        )

    def planned(name: str) -> Plan:
        plan = planned_as_is(name)
        if compression is not None:
            return plan
        return with_best_collectives(plan, trace, network, workers=workers, known=collectives)

    def candidate(plan: Plan) -> Candidate:
        timeline = simulate(trace, plan, network, workers=workers)
        return Candidate(plan=plan, predicted_s=timeline.iteration_s)

    names = [planner]
    if planner == "optimal":
        names += [f"optimal:{tolerance}" for tolerance in TOLERANCES]
    uniform = (candidate(planned(f"fixed:{round(size * MIB)}")) for size in UNIFORM_MIB)
    best_uniform = min(uniform, key=lambda one: one.predicted_s)
    found = [*(candidate(planned(name)) for name in names), best_uniform]
    unique = {one.plan.buckets: one for one in reversed(found)}
    torchs = candidate(planned_as_is("ddp"))
    unique.pop(torchs.plan.buckets, None)
    return [*reversed(unique.values()), replace(torchs, is_torchs=True)]


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

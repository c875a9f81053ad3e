"""How a job scales: planners, collectives and numbers of workers side by side."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.compression import Compression
from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.planning import OPERATIONS, default_collective, make_plan, priced_share
from gradweave._src.simulation.failures import Failures, Survival, survival
from gradweave._src.simulation.iteration import simulate
from gradweave._src.simulation.jitter import Jitter, slowest
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import Passes

PAPER_WORKERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Case(Struct, frozen=True, kw_only=True):
    """One job on one cluster: what to plan for, then to simulate."""

    trace: Trace
    network: Network
    workers: int
    planner: str
    collective: str
    compression: Compression | None = None
    passes: Passes = "backward"

    def plan(self) -> Plan:
        return make_plan(
            self.trace,
            self.network,
            workers=self.workers,
            planner=self.planner,
            collective=self.collective,
            compression=self.compression,
            passes=self.passes,
        )


class Outcome(Struct, frozen=True, kw_only=True):
    """What a case comes to; with jitter, means over the iterations."""

    trace: str
    network: str
    workers: int
    passes: Passes
    planner: str
    collective: str
    compression: str | None
    bytes_per_element: int | None  # None where tensors differ
    compute_s: float  # of a worker that waits for nobody
    communication_s: float
    iteration_s: float
    iteration_p95_s: float
    exposed_s: float
    overlap: float
    efficiency: float
    speedup: float
    samples_per_s: float
    messages: int
    extrapolated_from_bytes: int | None  # the end of the measured curve, where messages are larger
    survival: Survival | None = None  # what failures leave of it, where that was asked for


class Simulated(Struct, frozen=True, kw_only=True):
    """An outcome with what it was computed from."""

    plan: Plan
    timeline: Timeline  # of the first iteration
    outcome: Outcome


def cases(
    traces: Sequence[Trace],
    networks: Sequence[Network],
    *,
    workers: Sequence[int],
    planners: Sequence[str],
    collectives: Sequence[str | None],
    compression: Compression | None = None,
    passes: Sequence[Passes] = ("backward",),
) -> list[Case]:
    """Return every combination; None among the collectives is each network's own."""
    return [
        Case(
            trace=trace,
            network=network,
            workers=count,
            planner=planner,
            collective=collective
            or default_collective(network, compression=compression, passes=kind),
            compression=compression,
            passes=kind,
        )
        for trace, network, collective, count, kind, planner in product(
            traces, networks, collectives, workers, passes, planners
        )
    ]


def run(
    case: Case,
    *,
    jitter: Jitter | None = None,
    iterations: int = 1,
    seed: int = 0,
    failures: Failures | None = None,
) -> Simulated:
    """Plan for the trace as it is, then simulate; with jitter, ``iterations`` different ones."""
    plan = case.plan()
    timelines = [
        simulate(trace, plan, case.network, workers=case.workers)
        for trace in _iterations(case, jitter, iterations, seed)
    ]
    outcome = _outcome(case, plan, timelines)
    if failures is not None:
        outcome = replace(outcome, survival=survival(failures, workers=case.workers))
    return Simulated(plan=plan, timeline=timelines[0], outcome=outcome)


def _iterations(case: Case, jitter: Jitter | None, iterations: int, seed: int) -> Iterator[Trace]:
    if jitter is None:
        yield case.trace
        return
    if jitter.stragglers > case.workers:
        raise RequestError(f"{jitter.stragglers} stragglers among {case.workers} workers")
    random = np.random.default_rng(seed)
    for _ in range(iterations):
        yield slowest(case.trace, jitter, workers=case.workers, random=random)


def _outcome(case: Case, plan: Plan, timelines: Sequence[Timeline]) -> Outcome:
    iterations_s = [timeline.iteration_s for timeline in timelines]
    iteration_s = float(np.mean(iterations_s))
    communication_s = float(np.mean([timeline.communication_s for timeline in timelines]))
    exposed_s = float(np.mean([timeline.exposed_s for timeline in timelines]))
    efficiency = case.trace.compute_s / iteration_s
    return Outcome(
        trace=case.trace.name,
        network=case.network.name,
        workers=case.workers,
        passes=case.passes,
        planner=case.planner,
        collective=case.collective,
        compression=None if case.compression is None else str(case.compression),
        bytes_per_element=_width(case.trace),
        compute_s=case.trace.compute_s,
        communication_s=communication_s,
        iteration_s=iteration_s,
        iteration_p95_s=float(np.quantile(iterations_s, 0.95)),
        exposed_s=exposed_s,
        overlap=float(np.mean([timeline.overlap for timeline in timelines])),
        efficiency=efficiency,
        speedup=case.workers * efficiency,
        samples_per_s=case.workers * case.trace.batch_size / iteration_s,
        messages=len(plan.buckets),
        extrapolated_from_bytes=_extrapolated_from(case, plan),
    )


def _width(trace: Trace) -> int | None:
    widths = {tensor.bytes_per_element for tensor in trace.tensors}
    return widths.pop() if len(widths) == 1 else None


def _extrapolated_from(case: Case, plan: Plan) -> int | None:
    known_to_bytes = min(
        case.network.cost(
            operation, case.collective, workers=case.workers, compression=case.compression
        ).known_to_bytes
        for operation in OPERATIONS[case.passes]
    )
    known_to_bytes /= priced_share(case.trace, case.compression)
    if plan.bucket_bytes(case.trace).max() <= known_to_bytes:
        return None
    return int(known_to_bytes)

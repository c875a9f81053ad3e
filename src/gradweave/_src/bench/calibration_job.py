"""What each rank of ``gradweave calibrate`` runs: ``python -m …calibration_job FILE``."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from gradweave._src.bench.calibration import (
    CalibrationAnswer,
    CalibrationQuestion,
    RecordedJob,
    ReplayedJob,
)
from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.ranks import default_group, node_topology
from gradweave._src.bench.replayed_load import replaying
from gradweave._src.bench.trainee import BATCH
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.lanes import LANES
from gradweave._src.comm.small_messages import largest
from gradweave._src.measure.backward import record_trace
from gradweave._src.measure.network import Surroundings, measure_network
from gradweave._src.network import Network
from gradweave._src.planning import OPERATIONS
from gradweave._src.session.compression_worth import with_compression_price
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.settings import settings_for
from gradweave._src.sparse.timing import MOST_TIMED, exchange_cost, selection_s_per_element
from gradweave._src.workloads.replay import Replay

RECORDED_WARMUP, RECORDED_ITERATIONS = 2, 5
COPIED_TIMES = 7


def in_default_group(
    question: CalibrationQuestion, *, advance: Callable[[], None]
) -> Network | None:
    """Calibrate the group that the environment describes; rank 0 has the answer."""
    with default_group() as group:
        return calibrated(question, group, advance=advance)


def calibrated(
    question: CalibrationQuestion, group: dist.ProcessGroup, *, advance: Callable[[], None]
) -> Network | None:
    """Take this rank's part in a calibration, and return the network on rank 0."""
    topology = node_topology(group, nodes_per_rack=question.nodes_per_rack)
    # Making groups takes a while, so other lanes are only made where they are needed.
    is_sharded = any(way.operation in OPERATIONS["both"] for way in question.ways)
    network = measure_network(
        group,
        name=question.name,
        ways=question.ways,
        largest_bytes=question.largest_bytes,
        repeats=question.repeats,
        communicator=Communicator(group, topology=topology),
        other_lanes=[
            Communicator(same_ranks(group), topology=topology)
            for _ in range(LANES - 1 if is_sharded else 0)
        ],
        keeps_slow=question.keeps_slow,
        advance=advance if group.rank() == 0 else lambda: None,
        beside=None if question.job is None else _idle_and_beside(question.job),
    )
    with nullcontext() if question.job is None else replaying(question.job):
        network = _with_compressions(network, question, group)
    return network if group.rank() == 0 else None


def _idle_and_beside(job: ReplayedJob) -> Surroundings:
    return {"nothing": nullcontext, "compute": partial(replaying, job)}


def _with_compressions(
    network: Network, question: CalibrationQuestion, group: dist.ProcessGroup
) -> Network:
    for compression in question.compressions:
        mine_s = selection_s_per_element(
            MOST_TIMED,
            like=torch.zeros(1),
            density=compression.density,
            settings=settings_for(compression),
        )
        (slowest_s,) = largest(group, [mine_s])
        network = with_compression_price(
            network,
            compression,
            selection_s_per_element=slowest_s,
            exchange=exchange_cost(
                Exchanger(group), exchange=compression.method, density=compression.density
            ),
            workers=group.size(),
        )
    return network


def recorded(job: ReplayedJob, group: dist.ProcessGroup) -> RecordedJob:
    """Replay the job on every rank at once; all return the same."""
    model = Replay(job.trace, mode=job.mode)

    def step() -> None:
        model.zero_grad()
        model(BATCH).backward()

    group.barrier().wait()
    recording = record_trace(
        model,
        step,
        name=job.trace.name,
        batch_size=job.trace.batch_size,
        warmup=RECORDED_WARMUP,
        iterations=RECORDED_ITERATIONS,
        group=group,
    )
    gradients = [p.grad.view(-1) for p in model.parameters() if p.grad is not None]
    group.barrier().wait()
    mine_s = _copy_s(gradients) / sum(gradient.nbytes for gradient in gradients)
    (slowest_s,) = largest(group, [mine_s])
    # Gradients that come at once may change places; plans follow the order of backward.
    names = [tensor.name for tensor in job.trace.tensors]
    return RecordedJob(trace=recording.trace.in_order(names), copy_s_per_byte=slowest_s)


def _copy_s(gradients: Sequence[torch.Tensor]) -> float:
    """Return the seconds to copy gradients into a bucket one by one: half of in and out again."""
    bucket = torch.zeros(sum(gradient.numel() for gradient in gradients))
    places = torch.split(bucket, [gradient.numel() for gradient in gradients])
    taken_s = []
    for _ in range(COPIED_TIMES):
        started_s = time.perf_counter()
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(gradient)
        for place, gradient in zip(places, gradients, strict=True):
            gradient.copy_(place)
        taken_s.append((time.perf_counter() - started_s) / 2)
    return median(taken_s)


def main() -> None:
    question = asked(CalibrationQuestion)
    with default_group() as group:
        if question.job is not None:
            job = recorded(question.job, group)
            if group.rank() == 0:
                answer(CalibrationAnswer(recorded=job))
        found = calibrated(question, group, advance=lambda: answer(CalibrationAnswer()))
    if found is not None:
        answer(CalibrationAnswer(network=found))


if __name__ == "__main__":
    main()

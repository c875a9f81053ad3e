"""What each rank of ``gradweave bench training`` runs: ``python -m …training_job FILE``.

Every repeat goes through all runtimes, each on a fresh wrapper around the same replayed model, so
that a machine that drifts drifts for all of them.
"""

import time
from collections.abc import Iterator
from statistics import median

import torch.distributed as dist
from msgspec.structs import replace

from gradweave._src.bench.jobs import answer, asked
from gradweave._src.bench.peer_plans import computes
from gradweave._src.bench.peers import computing_s
from gradweave._src.bench.ranks import default_group
from gradweave._src.bench.runtimes import running
from gradweave._src.bench.trainee import Trainee
from gradweave._src.bench.training import (
    Case,
    TrainingAnswer,
    TrainingQuestion,
    finds_its_plan,
    precision_of,
)
from gradweave._src.comm.small_messages import largest
from gradweave._src.errors import RequestError
from gradweave._src.runs import Prediction
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.timeline import Timeline
from gradweave._src.workloads.replay import Replay

TIMELINE_ITERATIONS = 5


def found_by_itself(runtime: str, trainee: Trainee) -> TrainingAnswer:
    """Return the plan that our wrapper settles on, what it expects, and how it explains that."""
    ddp = DistributedDataParallel(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        precision=precision_of(runtime),
    )
    while (found := ddp.findings()).stage != "settled":
        trainee.iterate(ddp, None)
    if found.plan is None or found.predicted is None:
        raise RequestError(ddp.explain())
    return TrainingAnswer(
        runtime=runtime,
        prediction=Prediction(runtime=runtime, plan=found.plan, timeline=found.predicted),
        explanation=ddp.explain(),
    )


def timed(case: Case, trainee: Trainee, question: TrainingQuestion) -> TrainingAnswer:
    taken_s = []
    with running(case, trainee) as run:
        for _ in range(question.warmup):
            run.step()
        correct = run.is_correct()
        trainee.group.barrier().wait()
        run.step()  # messages beside forward are those of the step before
        for _ in range(question.iterations):
            started_s = time.perf_counter()
            run.step()
            taken_s.append(time.perf_counter() - started_s)
    slowest_s = largest(trainee.group, taken_s)
    return TrainingAnswer(runtime=case.runtime, iteration_s=median(slowest_s), correct=correct)


def timelines(case: Case, trainee: Trainee, question: TrainingQuestion) -> list[Timeline]:
    """Return all ranks' timelines of rank 0's median iteration; empty where none are noted."""
    found = []
    with running(replace(case, noting=True), trainee) as run:
        for number in range(question.warmup + TIMELINE_ITERATIONS):
            run.step()
            if number >= question.warmup and (noted := run.timelines()):
                found.append(noted)
    found.sort(key=lambda one: one[0].iteration_s)
    return found[len(found) // 2] if found else []


def answers(question: TrainingQuestion, group: dist.ProcessGroup) -> Iterator[TrainingAnswer]:
    model = Replay(question.trace, mode=question.mode, gradient=group.size() * (group.rank() + 1.0))
    trainee = Trainee(model, group)
    cases = list(question.cases)
    for number, case in enumerate(cases):
        if finds_its_plan(case.runtime) and case.plan is None:
            found = found_by_itself(case.runtime, trainee)
            assert found.prediction is not None
            cases[number] = replace(case, plan=found.prediction.plan)
            yield found
        elif computes(case.runtime):
            taken_s = computing_s(case, trainee)
            yield TrainingAnswer(runtime=case.runtime, computing_s=tuple(taken_s))
    for _ in range(question.repeats):
        for case in cases:
            yield timed(case, trainee, question)
    if question.with_timelines:
        for case in cases:
            noted = timelines(case, trainee, question)
            yield TrainingAnswer(runtime=case.runtime, timelines=tuple(noted))


def main() -> None:
    question = asked(TrainingQuestion)
    with default_group() as group:
        for one in answers(question, group):
            if group.rank() == 0:
                answer(one)


if __name__ == "__main__":
    main()

"""Training a real model on real images on an emulated cluster, under one runtime after another."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec
from msgspec import Struct

from gradweave._src import files
from gradweave._src.bench.jobs import ask
from gradweave._src.bench.peer_plans import TORCH
from gradweave._src.bench.regret import FIRST_STEPS, SETTLED
from gradweave._src.bench.training import OURS
from gradweave._src.lab import Cluster
from gradweave._src.network import Network
from gradweave._src.planning import make_plan
from gradweave._src.results import Losses, LossSeries, Result, Results
from gradweave._src.runs import Prediction, RunFolder
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace

# A turn of a runtime, when all are settled.
STEPS_OF_A_TURN = 20


class RealQuestion(Struct, frozen=True, kw_only=True):
    """What ranks are to train, and under which runtimes.

    All runtimes take the same number of steps: as many as those need to settle that plan by
    themselves.
    """

    runtimes: tuple[str, ...]
    model: str  # a name of gradweave._src.workloads.models
    least_steps: int
    batch_size: int  # of each worker
    learning_rate: float
    is_double: bool = False  # in float64, where roundings are too small to grow into losses
    steps_when_settled: int = 0  # and so many steps more
    turns: int = 0  # afterwards, when all are settled, each runtime has so many, in changing order
    for_folder: bool = False  # whether ranks also tell what a run's folder holds


class Besides(Struct, frozen=True, kw_only=True):
    """What a run's folder holds besides losses."""

    trace: Trace  # this and the network as our wrapper has found them while it trained
    network: Network
    found: Prediction  # by our wrapper
    compute_s: float  # what a step takes without any messages
    timelines: dict[str, tuple[Timeline, ...]]  # of one step, by runtime and rank


class RealAnswer(Struct, frozen=True, kw_only=True):
    """What rank 0 answers: a step was taken, one runtime's training is over, turns are, or all."""

    series: LossSeries | None = None
    correct: bool = True  # weights are alike on all ranks
    turns_s: dict[str, list[float]] | None = None  # what a step took in each turn, by runtime
    besides: Besides | None = None

    @property
    def is_of_a_step(self) -> bool:
        return self.series is None and self.turns_s is None and self.besides is None


class RealTraining(Struct, frozen=True, kw_only=True):
    """The outcome of a real training under all its runtimes."""

    series: dict[str, LossSeries]  # losses, as means over the ranks, by runtime
    wrong: frozenset[str]  # runtimes under which weights became different
    besides: Besides | None  # None where it was not asked for, or our wrapper found no plan
    turns_s: dict[str, list[float]] = {}  # what a step took in each turn, by runtime


def train_for_real(
    cluster: Cluster, question: RealQuestion, *, advance: Callable[[], None] = lambda: None
) -> RealTraining:
    answers: list[RealAnswer] = []

    def take(text: str) -> None:
        one = msgspec.json.decode(text, type=RealAnswer)
        if one.is_of_a_step:
            advance()
        else:
            answers.append(one)

    ask(cluster, "gradweave._src.bench.real_training_job", question, on_answer=take)
    return RealTraining(
        series={one.series.label: one.series for one in answers if one.series is not None},
        wrong=frozenset(one.series.label for one in answers if one.series and not one.correct),
        turns_s=next((one.turns_s for one in answers if one.turns_s is not None), {}),
        besides=next((one.besides for one in answers if one.besides is not None), None),
    )


def steps_s(series: LossSeries) -> list[float]:
    return [after - before for before, after in pairwise((0.0, *series.wall_s))]


def settled_s(series: LossSeries) -> float:
    """Return what a step takes when planning is over, or after a few steps where nobody plans."""
    begin = next((one.step for one in series.phases if one.stage == SETTLED), FIRST_STEPS)
    return median(steps_s(series)[begin:] or steps_s(series))


def write_run(
    folder: RunFolder, cluster: Cluster, training: RealTraining, besides: Besides, *, command: str
) -> list[Result]:
    """Write torch's wrapper and ours as one run, priced by what ours learnt while it trained."""
    predictions = {OURS: besides.found, TORCH: _torchs(besides, cluster.spec.world_size)}
    folder.begin(besides.trace, besides.network, list(predictions))
    for prediction in predictions.values():
        folder.predict(prediction)
    rows = [_result(cluster, training, prediction, besides) for prediction in predictions.values()]
    folder.finish(Results(command=command, rows=tuple(rows)), besides.timelines)
    losses = Losses(series=tuple(training.series[name] for name in predictions))
    files.write(folder.path / "losses.json", losses)
    return rows


def _torchs(besides: Besides, workers: int) -> Prediction:
    trace, network = besides.trace, besides.network
    plan = make_plan(trace, network, workers=workers, planner="ddp", collective="native")
    timeline = simulate(trace, plan, network, workers=workers)
    return Prediction(runtime=TORCH, plan=plan, timeline=timeline)


def _result(
    cluster: Cluster, training: RealTraining, prediction: Prediction, besides: Besides
) -> Result:
    iteration_s = settled_s(training.series[prediction.runtime])
    predicted_s = prediction.timeline.iteration_s
    return Result(
        trace=besides.trace.name,
        runtime=prediction.runtime,
        workers=cluster.spec.world_size,
        nodes=cluster.spec.nodes,
        ranks_per_node=cluster.spec.ranks_per_node,
        rate=cluster.spec.rate,
        iteration_s=iteration_s,
        predicted_s=predicted_s,
        prediction_error=predicted_s / iteration_s - 1,
        compute_s=besides.compute_s,
        exposed_s=max(0.0, iteration_s - besides.compute_s),
        messages=len(prediction.plan.buckets),
        speedup=settled_s(training.series[TORCH]) / iteration_s,
        repeats_s=(iteration_s,),
        correct=prediction.runtime not in training.wrong,
        bucket_cap_mb=None,
    )

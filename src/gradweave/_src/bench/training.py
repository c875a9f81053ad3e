"""Training speed on a cluster: predicted first, then measured, runtimes taking turns."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.bench.calibration import RecordedJob
from gradweave._src.bench.jobs import ask
from gradweave._src.bench.peer_plans import (
    NATIVE,
    PEERS,
    SWEPT,
    TORCH,
    TUNABLE,
    Job,
    computes,
    find_peer,
    is_tuned,
)
from gradweave._src.collectives import names
from gradweave._src.compression import (
    EXACT,
    EXCHANGE_NAMES,
    ROUNDED,
    ROUNDED_TO,
    ROUNDING_NAMES,
    Compression,
    check_precision,
    parse_compression,
)
from gradweave._src.errors import RequestError
from gradweave._src.lab import Cluster
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.planning import (
    BOTH_PASSES_COLLECTIVE,
    FOR_ROUNDED,
    OPERATIONS,
    PLANNERS,
    find_planner,
    make_plan,
)
from gradweave._src.planning.bsp import LOOPS, find_loop
from gradweave._src.planning.joint import plan_among
from gradweave._src.results import Result, Results
from gradweave._src.runs import Prediction, RunFolder
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import (
    MIB,
    ReplayMode,
    Way,
    alternatives,
    parse_spec,
    refuse_argument,
)

JOB = "gradweave._src.bench.training_job"

OURS, COMPUTE = "gradweave", "compute"
SHARDED = "sharded"
# As ``timeline:wfbp``: the plan of a planner, under a wrapper that notes a timeline.
NOTING = "timeline"
# Behind a planner's name, as in ``wfbp@parameter-server:4``: the collective that its messages are
# planned for and sent by. With ANY each message takes the cheapest of all that were measured.
BY = "@"
ANY = "any"

# Values of `bucket_cap_mb` that a patient user would try.
SWEPT_MB = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 25, 35, 50, 75, 100, 150, 200)


class Case(Struct, frozen=True, kw_only=True):
    """A runtime, and the plan it is to follow; OURS finds its own, COMPUTE sends nothing."""

    runtime: str
    plan: Plan | None = None
    bucket_cap_mb: float | None = None  # torch's own argument, where the runtime is torch's own
    noting: bool = False  # whether a timeline is noted while it is timed

    @property
    def planned(self) -> Plan:
        """The plan of a case that is known to have one."""
        assert self.plan is not None
        return self.plan


class TrainingQuestion(Struct, frozen=True, kw_only=True):
    trace: Trace
    mode: ReplayMode
    cases: tuple[Case, ...]
    warmup: int
    iterations: int
    repeats: int
    with_timelines: bool


class TrainingAnswer(Struct, frozen=True, kw_only=True):
    """What ranks answer about one case: several answers, each with some of the fields.

    Before it is timed, this is the plan it has found and what that is expected to do, or what ranks
    compute for each bucket. Then it is what the slowest rank took in one repeat, and in the end the
    timelines of all ranks.
    """

    runtime: str
    prediction: Prediction | None = None
    explanation: str | None = None  # of the plan it has found
    computing_s: tuple[float, ...] = ()
    iteration_s: float | None = None  # median over the iterations of this repeat
    correct: bool | None = None  # gradients were the mean over the ranks, and buckets the plan's
    timelines: tuple[Timeline, ...] = ()


class Settings(Struct, frozen=True, kw_only=True):
    runtimes: tuple[str, ...]
    mode: ReplayMode
    warmup: int
    iterations: int
    repeats: int
    with_timelines: bool = True


class Place(NamedTuple):
    """Where training runs, as its results tell."""

    nodes: int
    ranks_per_node: int
    rate: str | None  # of links, where they are held to one
    workers: int


# A function that has every rank answer a question, and passes on each answer as it comes.
AskRanks = Callable[[TrainingQuestion, Callable[[TrainingAnswer], None]], None]


def runtime_names() -> list[str]:
    """Return the names of all runtimes; most of them take an argument behind a colon."""
    tuned = [f"{name}{SWEPT}" for name in TUNABLE]
    ours = [OURS, SHARDED, ROUNDED, *LOOPS, *ROUNDING_NAMES, *EXCHANGE_NAMES, *PLANNERS]
    return [*PEERS, *tuned, *ours]


def check_runtimes(runtimes: Sequence[str]) -> None:
    """Refuse runtimes that mean nothing, before a cluster is built for them."""
    known = runtime_names()
    for name in runtimes:
        if BY in name:
            _check_collective(name)
            continue
        spec = parse_spec(name)
        if spec.name not in {*known, NOTING}:
            raise RequestError(f"no runtime {spec.name!r}{alternatives(spec.name, known)}")
        if spec.name in {ROUNDED, *ROUNDING_NAMES}:
            refuse_argument(spec)
            continue
        if find_peer(name) is not None:
            continue
        if finds_its_plan(name):
            check_precision(precision_of(name))
            continue
        if spec.name in LOOPS:
            find_loop(name)
            continue
        if spec.name in EXCHANGE_NAMES:
            parse_compression(name)
            continue
        find_planner(_planner(name))
    if len(set(runtimes)) < len(runtimes):
        raise RequestError(f"a runtime stands twice in {','.join(runtimes)}")


def _check_collective(runtime: str) -> None:
    planner, _, collective = runtime.partition(BY)
    find_planner(planner)
    known = [*names("all-reduce"), ANY]
    name = parse_spec(collective).name
    if name not in {"native", *known}:
        raise RequestError(f"{runtime}: no all-reduce by {name!r}{alternatives(name, known)}")


def finds_its_plan(runtime: str) -> bool:
    """Return whether it is ``gradweave``, or ``gradweave:rounded`` and the like."""
    return parse_spec(runtime).name == OURS


def precision_of(runtime: str) -> str:
    return parse_spec(runtime).argument or EXACT


def with_collectives(runtimes: Sequence[str], collectives: Sequence[str]) -> tuple[str, ...]:
    """Return the runtimes, and each planner among them once more by each of these collectives."""
    by = (
        f"{name}{BY}{collective}"
        for name in runtimes
        if parse_spec(name).name in PLANNERS and BY not in name
        for collective in collectives
    )
    return (*runtimes, *by)


def to_measure(runtimes: Sequence[str]) -> tuple[Way, ...]:
    """Return what a calibration has to time, so that all of these runtimes can be predicted."""
    found = [NATIVE]
    for name in runtimes:
        if BY in name:
            collective = name.partition(BY)[2]
            found += [] if collective == ANY else [Way("all-reduce", collective)]
        elif parse_spec(name).name == SHARDED:
            found += [Way(operation, BOTH_PASSES_COLLECTIVE) for operation in OPERATIONS["both"]]
        elif parse_spec(name).name in LOOPS:
            loop = find_loop(name)
            found += [Way(operation, loop.collective) for operation in loop.operations]
        elif (peer := find_peer(name)) is not None:
            found += peer.ways
        else:
            found += [Way("all-reduce", str(travel)) for travel in _rounded_ways(name)]
    return tuple(dict.fromkeys(found))


def needs_slow_ways(runtimes: Sequence[str]) -> bool:
    """Return whether a runtime names a collective, whose price is wanted even if it is slow."""
    return any(BY in name for name in runtimes)


def compressions_of(runtimes: Sequence[str]) -> tuple[Compression, ...]:
    """Return the compressions of runtimes that send a share of the gradients only."""
    return tuple(parse_compression(r) for r in runtimes if parse_spec(r).name in EXCHANGE_NAMES)


def train_on_cluster(
    cluster: Cluster,
    trace: Trace,
    network: Network,
    settings: Settings,
    *,
    folder: RunFolder,
    command: str,
    advance: Callable[[], None] = lambda: None,
    found: Sequence[Prediction] = (),
    recorded: RecordedJob | None = None,
) -> list[Result]:
    """Train on an emulated cluster."""
    spec = cluster.spec
    place = Place(spec.nodes, spec.ranks_per_node, spec.rate, spec.world_size)
    return train(
        place,
        on_cluster(cluster),
        trace,
        network,
        settings,
        folder=folder,
        command=command,
        advance=advance,
        found=found,
        recorded=recorded,
    )


def on_cluster(cluster: Cluster) -> AskRanks:
    """Return a function that asks the ranks of an emulated cluster."""

    def ask_ranks(question: TrainingQuestion, take: Callable[[TrainingAnswer], None]) -> None:
        def decode(text: str) -> None:
            take(msgspec.json.decode(text, type=TrainingAnswer))

        ask(cluster, JOB, question, on_answer=decode)

    return ask_ranks


def require_room(folder: RunFolder, settings: Settings) -> None:
    """Refuse a folder in which something is in the way of such a run.

    Ask before whatever takes minutes.
    """
    folder.require_room(_noted(settings))


def _noted(settings: Settings) -> tuple[str, ...]:
    """Return the runtimes of which something is written: computing alone has timelines, too."""
    return (COMPUTE, *settings.runtimes)


def train(
    place: Place,
    ask_ranks: AskRanks,
    trace: Trace,
    network: Network,
    settings: Settings,
    *,
    folder: RunFolder,
    command: str,
    advance: Callable[[], None],
    found: Sequence[Prediction] = (),
    recorded: RecordedJob | None = None,
) -> list[Result]:
    """Train under all runtimes, and write what is predicted and what is measured to the folder.

    Predictions are in the folder before the runtimes run. Runtimes that find their plan do not do
    so again if it was ``found`` before. If the replayed trace was ``recorded`` where it will run,
    plans and predictions go by that.
    """
    require_room(folder, settings)
    job = Job(trace, network, place.workers)
    if recorded is not None:
        job = Job(recorded.trace, network, place.workers, recorded.copy_s_per_byte)
    best_cap_mb = {
        name: _best_cap_mb(name, ask_ranks, job, settings, advance)
        for name in settings.runtimes
        if is_tuned(name)
    }
    known = {prediction.runtime: prediction for prediction in found}
    cases = [
        _following(_case(name, job, best_cap_mb.get(name)), known.get(name))
        for name in settings.runtimes
    ]
    folder.begin(trace, network, _noted(settings))
    predictions: dict[str, Prediction] = {}

    def expect(prediction: Prediction) -> None:
        predictions[prediction.runtime] = prediction
        folder.predict(prediction)

    def expect_of(case: Case, computing_s: Sequence[float] = ()) -> None:
        timeline = _predicted(case.runtime, case.planned, job, computing_s)
        expect(Prediction(runtime=case.runtime, plan=case.planned, timeline=timeline))

    def learn(answer: TrainingAnswer) -> None:
        if answer.prediction is not None:
            expect(answer.prediction)
        elif answer.computing_s:
            expect_of(named[answer.runtime], answer.computing_s)

    named = {case.runtime: case for case in cases}
    for case in cases:
        if case.runtime in known:
            expect(known[case.runtime])
        elif case.plan is not None and not computes(case.runtime):
            expect_of(case)
    question = _question(
        trace, [Case(runtime=COMPUTE), *cases], settings, timelines=settings.with_timelines
    )
    answers = ask_for_times(ask_ranks, question, advance, learn)
    results = _results(place, trace, cases, predictions, answers)
    folder.finish(
        Results(command=command, rows=tuple(results)),
        {a.runtime: a.timelines for a in answers if a.timelines},
    )
    return results


def _following(case: Case, found: Prediction | None) -> Case:
    return case if found is None else replace(case, plan=found.plan)


def steps(trace: Trace, settings: Settings, found: Sequence[Prediction] = ()) -> int:
    """Return how many times ``train`` will advance."""
    caps = swept_caps_mb(trace.nbytes.sum())
    swept = len(caps) * SWEEP_REPEATS * sum(map(is_tuned, settings.runtimes))
    asked = sum(finds_its_plan(name) or computes(name) for name in settings.runtimes) - len(found)
    passes = settings.repeats + (1 if settings.with_timelines else 0)
    return swept + asked + (len(settings.runtimes) + 1) * passes


SWEEP_REPEATS = 3
SWEEP_ITERATIONS = 3


def _best_cap_mb(
    runtime: str, ask_ranks: AskRanks, job: Job, settings: Settings, advance: Callable[[], None]
) -> float | None:
    """Return the cap with which a runtime is fastest, of those that a patient user would try.

    It is None where nothing is faster than torch's own caps.
    """
    cases = [
        replace(_case(runtime, job, cap), runtime=f"{runtime}:{cap}")
        for cap in swept_caps_mb(job.trace.nbytes.sum())
    ]
    sweep = replace(settings, repeats=SWEEP_REPEATS, iterations=SWEEP_ITERATIONS)
    question = _question(job.trace, cases, sweep, timelines=False)
    answers = ask_for_times(ask_ranks, question, advance)
    return min(cases, key=lambda case: median_s(answers, case.runtime)).bucket_cap_mb


def swept_caps_mb(nbytes: float) -> list[float | None]:
    """Return the caps to try, up to the first that takes all of a model's gradients.

    None stands for torch's own, for a user who finds nothing better leaves the argument out.
    """
    smaller = [cap for cap in SWEPT_MB if cap < nbytes / MIB]
    return [None, *SWEPT_MB[: len(smaller) + 1]]


def _case(runtime: str, job: Job, cap_mb: float | None) -> Case:
    if finds_its_plan(runtime):
        return Case(runtime=runtime)
    if (peer := find_peer(runtime)) is not None:
        planner = "ddp" if cap_mb is None else f"fixed:{cap_mb:g}MiB"
        return Case(runtime=runtime, plan=peer.plan(job, planner), bucket_cap_mb=cap_mb)
    noting = parse_spec(runtime).name == NOTING
    return Case(runtime=runtime, plan=plan_of(runtime, job), noting=noting)


def plan_of(runtime: str, job: Job) -> Plan:
    """Return the plan of a runtime of ours that follows one."""
    if BY in runtime:
        return _plan_by(runtime, job)
    plan_for = partial(make_plan, job.trace, job.network, workers=job.workers)
    name = parse_spec(runtime).name
    if name in LOOPS:
        return find_loop(runtime).plan(job.trace)
    if name in EXCHANGE_NAMES:
        return plan_for(compression=parse_compression(runtime))
    if rounded := _rounded_ways(runtime):
        travels = (Travel("native"), *rounded) if name == ROUNDED else rounded
        return plan_among(job.trace, job.network, travels, workers=job.workers)
    if name == SHARDED:
        by = BOTH_PASSES_COLLECTIVE
        return plan_for(planner=_planner(runtime), collective=by, passes="both")
    return plan_for(planner=_planner(runtime), collective="native")


def _plan_by(runtime: str, job: Job) -> Plan:
    """Plan for the collective that is named, or for the cheapest measured one for each message."""
    planner, _, collective = runtime.partition(BY)
    if collective == ANY:
        measured = tuple(Travel(name) for name in job.network.collectives)
        return plan_among(job.trace, job.network, measured, workers=job.workers)
    return make_plan(
        job.trace, job.network, workers=job.workers, planner=planner, collective=collective
    )


def _rounded_ways(runtime: str) -> tuple[Travel, ...]:
    """Return the rounded ways that a runtime's messages may take; empty where it rounds nothing."""
    names = ROUNDED_TO if runtime == ROUNDED else [n for n in ROUNDING_NAMES if n == runtime]
    return tuple(Travel(FOR_ROUNDED, Compression(method=name)) for name in names)


def _planner(runtime: str) -> str:
    """Return the planner of a runtime: ``wfbp`` for ``timeline:wfbp`` and ``sharded:wfbp``."""
    name, argument = parse_spec(runtime)
    if name in {NOTING, SHARDED}:
        return argument or "optimal"
    return runtime


def _predicted(runtime: str, plan: Plan, job: Job, computing_s: Sequence[float]) -> Timeline:
    if (peer := find_peer(runtime)) is not None:
        return peer.predict(job, plan, computing_s)
    name = parse_spec(runtime).name
    # Ours is torch's wrapper; sharded training and loops have gradients where they are sent from.
    is_copied = name not in LOOPS and plan.passes == "backward" and plan.overlap
    return simulate(
        job.trace,
        plan,
        job.network,
        workers=job.workers,
        operations=find_loop(runtime).operations if name in LOOPS else None,
        copy_s_per_byte=job.copy_s_per_byte if is_copied else 0.0,
        # In both passes the next forward begins at once, as parameters come.
        idle_after_backward=plan.passes == "backward",
    )


def _question(
    trace: Trace, cases: Sequence[Case], settings: Settings, *, timelines: bool
) -> TrainingQuestion:
    return TrainingQuestion(
        trace=trace,
        mode=settings.mode,
        cases=tuple(cases),
        warmup=settings.warmup,
        iterations=settings.iterations,
        repeats=settings.repeats,
        with_timelines=timelines,
    )


def ask_for_times(
    ask_ranks: AskRanks,
    question: TrainingQuestion,
    advance: Callable[[], None],
    learn: Callable[[TrainingAnswer], None] = lambda _: None,
) -> list[TrainingAnswer]:
    """Return all answers of the ranks; ``learn`` sees each as it comes, in another thread."""
    answers: list[TrainingAnswer] = []

    def take(answer: TrainingAnswer) -> None:
        answers.append(answer)
        learn(answer)
        advance()

    ask_ranks(question, take)
    return answers


def _results(
    place: Place,
    trace: Trace,
    cases: Sequence[Case],
    predictions: Mapping[str, Prediction],
    answers: Sequence[TrainingAnswer],
) -> list[Result]:
    compute_s = median_s(answers, COMPUTE)
    torch_s = median_s(answers, TORCH) if any(c.runtime == TORCH for c in cases) else None
    results = []
    for case in cases:
        prediction = predictions[case.runtime]
        iteration_s = median_s(answers, case.runtime)
        results.append(
            Result(
                trace=trace.name,
                runtime=case.runtime,
                workers=place.workers,
                nodes=place.nodes,
                ranks_per_node=place.ranks_per_node,
                rate=place.rate,
                iteration_s=iteration_s,
                predicted_s=prediction.timeline.iteration_s,
                prediction_error=prediction.timeline.iteration_s / iteration_s - 1,
                compute_s=compute_s,
                exposed_s=max(0.0, iteration_s - compute_s),
                messages=len(prediction.plan.buckets),
                speedup=None if torch_s is None else torch_s / iteration_s,
                repeats_s=tuple(times_s(answers, case.runtime)),
                correct=all(a.correct for a in answers if _is_timing_of(a, case.runtime)),
                bucket_cap_mb=case.bucket_cap_mb,
            )
        )
    return results


def _is_timing_of(answer: TrainingAnswer, runtime: str) -> bool:
    return answer.runtime == runtime and answer.iteration_s is not None


def times_s(answers: Sequence[TrainingAnswer], runtime: str) -> list[float]:
    return [a.iteration_s or 0.0 for a in answers if _is_timing_of(a, runtime)]


def median_s(answers: Sequence[TrainingAnswer], runtime: str) -> float:
    return median(times_s(answers, runtime))

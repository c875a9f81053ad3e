"""Runs to report, written as the benchmark writes them, and random cases for the page's planner."""

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gradweave._src import files
from gradweave._src.compression import Compression, parse_compression
from gradweave._src.costs import Curve, Line, Link, flat
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.phases import Phases
from gradweave._src.planning import make_plan
from gradweave._src.results import Losses, LossSeries, Result, Results, StageBegin
from gradweave._src.runs import Prediction, Run, RunFolder
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Span, Timeline
from gradweave._src.trace import Tensor, Trace
from gradweave._src.training_record import Account, Steps

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
WORKERS = 4
RUNTIMES = {"torch-ddp": "ddp", "naive": "naive", "wfbp": "wfbp", "single": "single"}
RUNTIMES |= {"mgwfbp": "mgwfbp", "optimal": "optimal"}


def drawn_trace(tensors: int, *, seed: int = 0, name: str = "drawn") -> Trace:
    random = np.random.default_rng(seed)
    ready_s = np.cumsum(random.exponential(0.4 / tensors, tensors))
    elements = np.maximum(1, random.lognormal(8, 2.5, tensors)).astype(int)
    return Trace(
        name=name,
        origin="estimated",
        source="drawn",
        batch_size=32,
        tensors=tuple(
            Tensor(
                name=f"features.stage{place // 40}.unit{place % 40}.convolution.weight.{place}",
                elements=int(elements[place]),
                bytes_per_element=4,
                ready_s=float(ready_s[place]),
                forward_s=0.2 / tensors,
            )
            for place in range(tensors)
        ),
    )


def measured_network(name: str = "lab") -> Network:
    """Idle and beside compute, with links."""
    sizes = (1024, 65536, 2**20, 2**24)
    idle = Curve(nbytes=sizes, measured_s=(0.002, 0.0025, 0.02, 0.22))
    loaded = Curve(nbytes=sizes, measured_s=(0.003, 0.004, 0.03, 0.26))
    entry = CollectiveCost(
        operation="all-reduce", collective="native", workers=WORKERS, beside="nothing", cost=idle
    )
    return Network(
        name=name,
        source="made up",
        costs=(entry, replace(entry, beside="compute", cost=loaded, latency_s=0.0005)),
        links=flat(Link(latency_s=1.33e-4, s_per_byte=8.45e-9, sum_s_per_byte=3e-11)),
    )


def write_run(
    path: Path, trace: Trace, network: Network, *, runtimes: dict[str, str] | None = None
) -> Path:
    """Predicted by the simulator; measured as a recorder sees it, five percent slower."""
    predictions = []
    for runtime, planner in (runtimes or RUNTIMES).items():
        is_sharded, is_thinned = runtime == "sharded", runtime.startswith("gtopk")
        plan = make_plan(
            trace,
            network,
            workers=WORKERS,
            planner=planner,
            collective="ring" if is_sharded else "native",
            passes="both" if is_sharded else "backward",
            compression=parse_compression(runtime) if is_thinned else None,
        )
        timeline = simulate(trace, plan, network, workers=WORKERS)
        predictions.append(Prediction(runtime=runtime, plan=plan, timeline=timeline))
    return _written(path, trace, network, predictions)


def _written(path: Path, trace: Trace, network: Network, predictions: list[Prediction]) -> Path:
    measured = {p.runtime: _recorded(trace, p.timeline) for p in predictions}
    folder = RunFolder(path)
    folder.begin(trace, network, list(measured))
    for prediction in predictions:
        folder.predict(prediction)
    torch_s = measured[predictions[0].runtime].iteration_s
    rows = tuple(_result(trace, p, measured[p.runtime], torch_s) for p in predictions)
    by_rank = {name: [timeline, slower(timeline)] for name, timeline in measured.items()}
    folder.finish(Results(command="gradweave bench training", rows=rows), by_rank)
    return path


def slower(timeline: Timeline) -> Timeline:
    """The same with a backward that takes half as long again, and no message before its end."""
    (backward,) = (span for span in timeline.spans if span.lane == "backward")
    late_s = (backward.end_s - backward.start_s) / 2
    later = [
        replace(
            span,
            start_s=span.start_s + (late_s if span.lane == "communication" else 0.0),
            end_s=span.end_s + (late_s if span.lane != "forward" else 0.0),
        )
        for span in timeline.spans
    ]
    return Timeline(spans=tuple(later))


def _recorded(trace: Trace, predicted: Timeline) -> Timeline:
    forward_s = 1.05 * min(span.start_s for span in predicted.spans if span.lane == "backward")
    compute_s = forward_s + 1.05 * trace.backward_s
    spans = [
        Span(lane="forward", label="forward", start_s=0, end_s=forward_s, tensors=()),
        Span(lane="backward", label="backward", start_s=forward_s, end_s=compute_s, tensors=()),
    ]
    begin_s = {tensor.name: forward_s + 1.05 * tensor.ready_s for tensor in trace.tensors}
    spans += [
        replace(
            span,
            start_s=min(1.05 * span.start_s, max(begin_s[name] for name in span.tensors)),
            end_s=1.05 * span.end_s,
        )
        for span in predicted.spans
        if span.lane == "communication"
    ]
    return Timeline(spans=tuple(spans))


def _result(trace: Trace, prediction: Prediction, measured: Timeline, torch_s: float) -> Result:
    return Result(
        trace=trace.name,
        runtime=prediction.runtime,
        workers=WORKERS,
        nodes=WORKERS,
        ranks_per_node=1,
        rate="1gbit",
        iteration_s=measured.iteration_s,
        predicted_s=prediction.timeline.iteration_s,
        prediction_error=prediction.timeline.iteration_s / measured.iteration_s - 1,
        compute_s=measured.compute_s,
        exposed_s=measured.exposed_s,
        messages=len(prediction.plan.buckets),
        speedup=torch_s / measured.iteration_s,
        repeats_s=(measured.iteration_s,),
        correct=True,
        bucket_cap_mb=None,
    )


def write_hostile_run(path: Path) -> Path:
    """Every text that a folder can hold tries to leave its place."""
    trace = drawn_trace(12, name=HOSTILE)
    tensors = tuple(replace(t, name=f"{HOSTILE} {i}") for i, t in enumerate(trace.tensors))
    trace = replace(trace, tensors=tensors, source=HOSTILE)
    network = replace(measured_network(HOSTILE), source=HOSTILE)
    write_run(path, trace, network, runtimes={HOSTILE: "wfbp", "optimal": "optimal"})
    results = files.read(path / "results.json", Results)
    files.write(path / "results.json", replace(results, command=HOSTILE))
    write_losses(path, label=HOSTILE)
    return path


def write_odd_run(path: Path) -> Path:
    """One tensor, links alone, a server with push and pull, and a message that is thinned out."""
    trace = drawn_trace(1)
    network = Network(name="links", source="made up", links=measured_network().links)
    served = make_plan(trace, network, workers=WORKERS, collective="parameter-server")
    thinned = make_plan(
        trace,
        network,
        workers=WORKERS,
        compression=Compression(method="gtopk", density=0.001),
    )
    predictions = [
        Prediction(
            runtime=name, plan=plan, timeline=simulate(trace, plan, network, workers=WORKERS)
        )
        for name, plan in (("parameter-server:1", served), ("gtopk", thinned))
    ]
    return _written(path, trace, network, predictions)


STAGES = (("not begun", 0), ("recording", 1), ("trying", 8), ("settled", 20))
STEPS = 60


def write_training(
    path: Path,
    trace: Trace,
    network: Network | None,
    *,
    runtime: str = "gradweave",
    noted: bool = True,
    text: str = "Chosen: 3 messages by native.",
) -> Path:
    """As save_run() leaves it: without a network nothing is predicted."""
    planned = network or measured_network()
    plan = make_plan(trace, planned, workers=WORKERS)
    timeline = simulate(trace, plan, planned, workers=WORKERS)
    measured = _recorded(trace, timeline)
    prediction = Prediction(runtime=runtime, plan=plan, timeline=timeline)
    row = _result(trace, prediction, measured, measured.iteration_s)
    row = replace(row, rate=None, speedup=None, correct=None)
    if network is None:
        row = replace(row, predicted_s=None, prediction_error=None, compute_s=None, exposed_s=None)
    phases = Phases(input_s=0.011, forward_s=0.2, backward_s=0.4, network_s=0.07)
    stages = tuple(StageBegin(*stage) for stage in STAGES)
    run = Run(
        trace=trace,
        network=network,
        results=Results(command="train.py", rows=(row,)),
        plans={runtime: plan},
        predicted={} if network is None else {runtime: timeline},
        measured={runtime: (measured,) * WORKERS} if noted else {},
        steps=Steps(
            step_s=tuple(0.7 - 0.0005 * step for step in range(STEPS)),
            stages=stages,
            phases=(phases, replace(phases, backward_s=0.5), None, phases),
        ),
        account=Account(
            stage="settled",
            planning_steps=19,
            planning_s=12.5,
            baseline_step_s=0.75,
            step_s=0.5,
            gain=1.5,
            trials=(),
            note=None,
            explanation=text,
        ),
    )
    series = LossSeries(
        label=runtime,
        steps=tuple(range(STEPS)),
        losses=tuple(2.3 - 0.01 * step for step in range(STEPS)),
        wall_s=tuple(0.7 * (step + 1) for step in range(STEPS)),
        stages=stages,
    )
    RunFolder(path).write(run, Losses(series=(series,)))
    return path


def write_losses(path: Path, *, label: str = "gtopk:0.001") -> None:
    steps = tuple(range(0, 200, 20))
    series = [
        LossSeries(
            label=name,
            steps=steps,
            losses=tuple(2.3 * float(np.exp(-step / pace)) for step in steps),
            wall_s=tuple(step * step_s for step in steps),
        )
        for name, pace, step_s in (("dense", 60.0, 0.5), (label, 70.0, 0.1))
    ]
    files.write(path / "losses.json", Losses(series=tuple(series)))


COURSE = (("not begun", 0), ("recording", 1), ("learning", 4), ("trying", 12), ("settled", 30))


def write_step_losses(path: Path, *, label: str = "gradweave") -> None:
    """Every step of two trainings; ours is faster once it has settled."""
    steps = tuple(range(60))
    series = []
    for name, settled_s in (("torch-ddp", 0.3), (label, 0.2)):
        taken_s = [0.3 if step < COURSE[-1][1] else settled_s for step in steps]
        stages = COURSE if name == label else ()
        series.append(
            LossSeries(
                label=name,
                steps=steps,
                losses=tuple(2.3 * float(np.exp(-step / 40)) for step in steps),
                wall_s=tuple(float(end_s) for end_s in np.cumsum(taken_s)),
                stages=tuple(StageBegin(*stage) for stage in stages),
            )
        )
    files.write(path / "losses.json", Losses(series=tuple(series)))


def write_trained_run(path: Path) -> Path:
    """Torch's wrapper and ours, and one that changes the training, with every step of it."""
    runtimes = {"torch-ddp": "ddp", "gtopk": "optimal", "gradweave": "optimal"}
    write_run(path, drawn_trace(40), measured_network(), runtimes=runtimes)
    write_step_losses(path)
    return path


Case = tuple[Trace, Line, float]  # and a tolerance


def planner_cases(count: int, *, seed: int, most_tensors: int) -> list[Case]:
    """Equal ready times, equal sizes, free start-ups and free bytes are likely."""
    random = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        length = int(random.integers(1, most_tensors + 1))
        gaps = random.exponential(1.0, length) * random.integers(0, 2, length)
        gaps[0] += 0.1
        sizes = random.choice([1, 2, 50, 1000, int(random.integers(1, 10**8))], length)
        ready_s = np.cumsum(gaps) * 10.0 ** random.integers(-4, 1)
        trace = Trace(
            name="drawn",
            origin="estimated",
            source="drawn",
            batch_size=1,
            tensors=tuple(
                Tensor(
                    name=str(place),
                    elements=int(sizes[place]),
                    bytes_per_element=1,
                    ready_s=float(ready_s[place]),
                    forward_s=float(random.uniform(0, 0.01)),
                )
                for place in range(length)
            ),
        )
        scale_s = float(ready_s[-1])
        startups_s = [0.0, scale_s / length, random.exponential(scale_s / length)]
        startup_s = float(random.choice(startups_s, p=[0.1, 0.3, 0.6]))
        per_bytes = [0.0, random.exponential(scale_s) / float(sizes.sum())]
        per_byte = float(random.choice(per_bytes, p=[0.1, 0.9]))
        line = Line(startup_s=startup_s, s_per_byte=per_byte)
        cases.append((trace, line, float(random.choice([0.0, 0.01, 0.05]))))
    return cases


CurveCase = tuple[Trace, Curve]


def curve_cases(count: int, *, seed: int, most_tensors: int) -> list[CurveCase]:
    """The traces of ``planner_cases`` with measured points, some of them out of line."""
    random = np.random.default_rng(seed)
    cases = []
    for trace, line, _ in planner_cases(count, seed=seed, most_tensors=most_tensors):
        points = int(random.integers(2, 9))
        sizes = np.unique(random.integers(1, 10 ** random.integers(3, 9), points))
        sizes = np.union1d(sizes, [1, 10 ** int(random.integers(4, 8))])
        seconds = 1e-9 + line.seconds(sizes.astype(float)) * random.uniform(0.5, 1.5, len(sizes))
        seconds[-1] = max(seconds)  # or the last slope would fall
        curve = Curve(
            nbytes=tuple(int(size) for size in sizes),
            measured_s=tuple(float(one) for one in seconds),
        )
        cases.append((trace, curve))
    return cases


def curve_as_json(case: CurveCase) -> dict[str, object]:
    trace, curve = case
    line = Line(startup_s=0.0, s_per_byte=0.0)
    return as_json((trace, line, 0.01)) | {
        "bytes": list(curve.nbytes),
        "seconds": list(curve.measured_s),
    }


def as_json(case: Case) -> dict[str, object]:
    trace, line, tolerance = case
    return {
        "trace": {
            "bytes": [tensor.nbytes for tensor in trace.tensors],
            "ready_s": [tensor.ready_s for tensor in trace.tensors],
            "forward_s": [tensor.forward_s for tensor in trace.tensors],
        },
        "line": {"startup_s": line.startup_s, "s_per_byte": line.s_per_byte},
        "tolerance": tolerance,
    }

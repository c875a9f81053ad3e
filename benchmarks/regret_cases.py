"""The cases of regret.py: what is trained, and on which cluster where that belongs to it."""

from dataclasses import dataclass

from experiments import EXPERIMENTS, PAIRS, SHIPPED

from gradweave import Trace, load_trace
from gradweave._src.bench.regret import RealWork, ReplayedWork
from gradweave._src.lab import ClusterSpec
from gradweave._src.trace import Tensor

STEPS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    title: str
    work: ReplayedWork | RealWork
    spec: ClusterSpec | None = None  # None: any


def shipped() -> list[Case]:
    """Return the cases in which our settled wrapper is compared with torch's elsewhere."""
    return [
        _replayed(name, name, scale, forward_s=PAIRS.forward_s, backward_s=PAIRS.backward_s)
        for name, scale in SHIPPED
    ]


def whole() -> Case:
    """Return a case without gain: communication exceeds backward whatever is merged."""
    (both,) = (experiment for experiment in EXPERIMENTS if experiment.name == "both-passes")
    ((name, scale),) = both.traces
    times = {"forward_s": both.forward_s, "backward_s": both.backward_s}
    return _replayed(f"{name}-whole", name, scale, **times)


def real() -> Case:
    """Return a case without gain: its gradients are few, and its steps are short."""
    return Case(
        name="small-cnn",
        title="real training, 16 images of Fashion-MNIST a worker, SGD with momentum",
        work=RealWork(model="small-cnn", batch_size=16, learning_rate=0.02),
    )


def slow_link() -> Case:
    trace = made_trace(
        "slow-link", layers=10, elements=1_250_000, forward_s=0.007, backward_s=0.013
    )
    spec = ClusterSpec(nodes=2, rate="200mbit")
    return Case(name=trace.name, title=_described(trace), work=ReplayedWork(trace=trace), spec=spec)


def made_trace(
    name: str, *, layers: int, elements: int, forward_s: float, backward_s: float
) -> Trace:
    """Return a trace of equal layers, each a weight and a bias of a thousandth of its elements."""
    of_layer = elements // layers
    tensors = []
    for number, layer in enumerate(reversed(range(layers)), start=1):
        sizes = {"bias": of_layer // 1000, "weight": of_layer - of_layer // 1000}
        tensors += [
            Tensor(
                name=f"{layer}.{leaf}",
                elements=size,
                bytes_per_element=4,
                ready_s=backward_s * number / layers,
                forward_s=forward_s / layers if leaf == "bias" else 0.0,
            )
            for leaf, size in sizes.items()
        ]
    return Trace(
        name=name,
        origin="estimated",
        source="layers alike, made for a benchmark",
        batch_size=1,
        tensors=tuple(tensors),
    )


def _replayed(
    name: str, trace_name: str, scale: float, *, forward_s: float, backward_s: float
) -> Case:
    trace = load_trace(trace_name).rescaled(
        forward_s=forward_s, backward_s=backward_s, parameter_scale=scale
    )
    return Case(name=name, title=_described(trace), work=ReplayedWork(trace=trace))


def _described(trace: Trace) -> str:
    return (
        f"{len(trace.tensors)} tensors, {trace.nbytes.sum() / 1e6:.1f} MB, forward "
        f"{trace.forward_s * 1e3:.0f} ms, backward {trace.backward_s * 1e3:.0f} ms"
    )


CASES = {case.name: case for case in [*shipped(), whole(), real(), slow_link()]}

"""This module predicts what torch's wrapper costs on the measured network.

The model that it is asked about has 100 MB of gradients.
"""

from collections.abc import Sequence

from msgspec import Struct

from gradweave._src.costs import Curve
from gradweave._src.doctor.checkup import AllReduce
from gradweave._src.doctor.words import duration
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.simulation import cases, run
from gradweave._src.trace import Tensor, Trace

GRADIENT_BYTES = 100 * 10**6
TENSORS = 100
COMPUTE_S = (0.1, 0.3)
FORWARD_SHARE = 1 / 3


class PricedStep(Struct, frozen=True, kw_only=True):
    """One step of a model that computes for so long."""

    compute_s: float
    step_s: float
    exposed_s: float  # while nothing is computed


class Price(Struct, frozen=True, kw_only=True):
    gradient_bytes: int
    all_reduce_s: float  # of all gradients in one message
    steps: tuple[PricedStep, ...]


def price_of(all_reduces: Sequence[AllReduce], *, workers: int) -> Price | None:
    """Simulate torch's wrapper with what all-reduces took; None where too few were timed."""
    if len(all_reduces) < 2:  # noqa: PLR2004 a slope needs two
        return None
    ordered = sorted(all_reduces, key=lambda one: one.nbytes)
    seconds = [one.seconds for one in ordered]
    network = Network(
        name="measured",
        source="gloo's all-reduce on this group",
        costs=(
            CollectiveCost(
                operation="all-reduce",
                collective="native",
                workers=workers,
                cost=Curve(
                    nbytes=tuple(one.nbytes for one in ordered),
                    measured_s=(*seconds[:-1], max(seconds)),
                ),
            ),
        ),
    )
    return Price(
        gradient_bytes=GRADIENT_BYTES,
        all_reduce_s=network.seconds(
            "all-reduce", "native", nbytes=GRADIENT_BYTES, workers=workers
        ),
        steps=tuple(_step(network, workers, compute_s) for compute_s in COMPUTE_S),
    )


def sentences(price: Price) -> list[str]:
    first = (
        f"An all-reduce of {price.gradient_bytes / 1e6:.0f} MB of gradients takes "
        f"{duration(price.all_reduce_s)} on this network."
    )
    steps = [
        f"{duration(one.compute_s)} would take {duration(one.step_s)} a step, "
        f"{duration(one.exposed_s)} of it ({one.exposed_s / one.step_s:.0%}) waiting"
        for one in price.steps
    ]
    second = f"With torch DDP, a model that computes for {'; one of '.join(steps)}."
    last = (
        "Next: start gradweave calibrate --output network.json on the same ranks, as you have "
        "started the doctor, then: gradweave advise --trace resnet50 --network network.json"
    )
    return [first, second, last]


def _step(network: Network, workers: int, compute_s: float) -> PricedStep:
    (case,) = cases(
        [_even_trace(compute_s)],
        [network],
        workers=[workers],
        planners=["ddp"],
        collectives=["native"],
    )
    outcome = run(case).outcome
    return PricedStep(compute_s=compute_s, step_s=outcome.iteration_s, exposed_s=outcome.exposed_s)


def _even_trace(compute_s: float) -> Trace:
    """Return a trace of equal tensors, ready at equal distances."""
    forward_s = compute_s * FORWARD_SHARE
    backward_s = compute_s - forward_s
    return Trace(
        name=f"{GRADIENT_BYTES / 1e6:.0f} MB",
        origin="estimated",
        source="equal tensors at equal distances",
        batch_size=1,
        tensors=tuple(
            Tensor(
                name=f"tensor {number}",
                elements=GRADIENT_BYTES // TENSORS // 4,
                bytes_per_element=4,
                ready_s=backward_s * (number + 1) / TENSORS,
                forward_s=forward_s / TENSORS,
            )
            for number in range(TENSORS)
        ),
    )

"""How long planning takes, and how often the papers' rule misses the optimum: ``make bench``.

Prints medians of several repeats; nothing is asserted, because machines differ. What we aim at on
two shared cores stands beside each figure.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from gradweave import Tensor, Trace, load_network, load_trace
from gradweave._src.costs import Cost, Line
from gradweave._src.planning.optimal import DEFAULT_TOLERANCE, optimal
from gradweave._src.simulation import PAPER_WORKERS, cases, run

REPEATS = 5
RANDOM_INSTANCES = 5000
MODELS = ("googlenet-k80", "resnet50", "resnet152", "densenet161", "densenet201", "inceptionv4")
PLANNERS = ("wfbp", "single", "ddp", "mgwfbp", "optimal")
COLLECTIVES = ("ring", "double-tree")


def drawn_trace(
    tensors: int, *, backward_s: float, random: np.random.Generator | None = None
) -> Trace:
    """Draw a trace with sizes like real ones: most tensors small, most bytes in few."""
    random = random or np.random.default_rng(0)
    sizes = np.exp(random.normal(8, 3, tensors)).astype(int) + 1
    ready_s = np.sort(random.uniform(0, backward_s, tensors))
    return Trace(
        name=f"{tensors} tensors",
        origin="estimated",
        source="drawn at random",
        batch_size=1,
        tensors=tuple(
            Tensor(name=f"t{i}", elements=size, bytes_per_element=4, ready_s=ready, forward_s=0.0)
            for i, (size, ready) in enumerate(zip(sizes.tolist(), ready_s.tolist(), strict=True))
        ),
    )


def median_s(work: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s)


def papers_rule_misses(instances: int) -> tuple[float, float]:
    """Return the share of random instances in which Algorithm 1 ends late, and its worst excess."""
    random = np.random.default_rng(0)
    network = load_network("k80-10gbe")
    excesses = []
    for _ in range(instances):
        trace = drawn_trace(
            int(random.integers(2, 20)), backward_s=random.uniform(0, 0.1), random=random
        )
        workers = int(random.integers(2, 512))
        ends_s = [
            run(case).outcome.iteration_s
            for case in cases(
                [trace],
                [network],
                workers=[workers],
                planners=["mgwfbp", "optimal:0"],
                collectives=["ring"],
            )
        ]
        excesses.append(ends_s[0] / ends_s[1] - 1)
    missed = [excess for excess in excesses if excess > 1e-6]
    return len(missed) / instances, max(missed)


def sweep() -> int:
    todo = cases(
        [load_trace(name) for name in MODELS],
        [load_network("k80-10gbe")],
        workers=PAPER_WORKERS,
        planners=PLANNERS,
        collectives=COLLECTIVES,
    )
    return sum(run(case).outcome.messages for case in todo)


def report(what: str, work: Callable[[], object], *, aim_s: float) -> None:
    print(f"{what:62} {median_s(work):7.3f} s   (aim: under {aim_s:g} s)", flush=True)


def report_optimal(trace: Trace, cost: Cost, *, what: str, aim_s: float) -> None:
    for tolerance in (0.0, DEFAULT_TOLERANCE):
        messages = len(optimal(trace, cost, tolerance=tolerance))
        report(
            f"optimal:{tolerance:g}, {trace.name}, {what}, {messages} messages",
            lambda tolerance=tolerance: optimal(trace, cost, tolerance=tolerance),  # type: ignore[misc]
            aim_s=aim_s,
        )


def main() -> None:
    print(f"medians of {REPEATS}; Python {sys.version.split()[0]}, numpy {np.__version__}")
    for startup_s in (1e-6, 1e-4, 1e-2):
        cost = Line(startup_s=startup_s, s_per_byte=1e-10)
        trace = drawn_trace(100_000, backward_s=1.0)
        report_optimal(trace, cost, what=f"line, a = {startup_s:g} s", aim_s=1)
    curve = load_network("mpi-10gbe-measured").cost("all-reduce", "native", workers=8)
    for backward_s in (0.1, 1.0, 10.0):
        trace = drawn_trace(2_000, backward_s=backward_s)
        report_optimal(trace, curve, what=f"curve, backward {backward_s:g} s", aim_s=2)
    combinations = len(MODELS) * len(PAPER_WORKERS) * len(PLANNERS) * len(COLLECTIVES)
    report(f"sweep: 6 models x 10 workers x 5 planners x 2, {combinations} runs", sweep, aim_s=5)
    missed, worst = papers_rule_misses(RANDOM_INSTANCES)
    print(
        f"mgwfbp misses the optimum in {missed:.0%} of {RANDOM_INSTANCES} random instances, "
        f"by up to {worst:.0%}"
    )


if __name__ == "__main__":
    main()

"""Who is slow: ``python benchmarks/stragglers.py OUTPUT``.

A replayed model trains on four emulated nodes. In case after case a random rank takes 10, 20 or
50 % longer for its input, its forward or its backward pass, or its link is slower by as much; and
between any two of these nothing is wrong. After each case the wrapper is asked who is slow. Writes
OUTPUT.json (every case) and OUTPUT.md (how often rank and phase were right, false alarms, and what
a step was said to take without the fault beside what it takes). Twenty minutes; leave the machine
alone meanwhile. ``--quick`` takes a tenth of the cases.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from made_with import made_with
from msgspec import Struct

from gradweave import Tensor, Trace
from gradweave._src import files
from gradweave._src.bench.stragglers import (
    Fault,
    Healed,
    StragglersQuestion,
    Watched,
    healed,
    watch_ranks,
)
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.phases import PHASES

NODES, RATE = 4, "200mbit"
SHARES = (0.1, 0.2, 0.5)
CASES_OF_EACH, CASES_IF_QUICK = 10, 1  # share and phase
INPUT_S, FORWARD_S, BACKWARD_S = 0.04, 0.04, 0.045
LAYERS, LAYER_ELEMENTS, FIRST_ELEMENTS = 8, 7_500, 150_000
SETTLING_STEPS, STEPS = 2, 22


class Everything(Struct, frozen=True, kw_only=True):
    made_with: str
    cases: list[Watched]


def trace() -> Trace:
    """Return a trace of equal layers, and an embedding before them whose gradient comes last.

    That is large, and nothing can hide its message, so every phase, the network among them, is
    about a quarter of a step.
    """
    layers = [
        Tensor(
            name=f"{layer}.weight",
            elements=LAYER_ELEMENTS if layer else FIRST_ELEMENTS,
            bytes_per_element=4,
            ready_s=BACKWARD_S * number / (LAYERS + 1),
            forward_s=FORWARD_S / (LAYERS + 1),
        )
        for number, layer in enumerate(reversed(range(LAYERS + 1)), start=1)
    ]
    return Trace(
        name="embedding-and-layers",
        origin="estimated",
        source="made for a benchmark",
        batch_size=1,
        tensors=tuple(layers),
    )


def schedule(of_each: int, *, seed: int) -> Iterator[Fault | None]:
    """Yield all phases and shares equally often, on random ranks, each between healthy cases."""
    draw = random.Random(seed)  # noqa: S311 no secret
    faults = [
        Fault(rank=draw.randrange(NODES), phase=phase, share=share)
        for phase in PHASES
        for share in SHARES
        for _ in range(of_each)
    ]
    draw.shuffle(faults)
    yield None
    for fault in faults:
        yield fault
        yield None


def page(everything: Everything, name: str) -> str:
    cases = everything.cases
    undisturbed = [case for case in cases if case.fault is None]
    alarms = [case for case in undisturbed if not case.is_right]
    faulty = [case for case in cases if case.fault is not None]
    found = healed(cases)
    right = sum(case.is_right for case in faulty)
    compute_ms = [f"{seconds * 1e3:.0f}" for seconds in (INPUT_S, FORWARD_S, BACKWARD_S)]
    lines = [
        "# Who is slow",
        "",
        f"Made by `python benchmarks/stragglers.py {name}`: a replayed model on {NODES} emulated "
        f"nodes at {RATE}, planned by the wrapper itself; input {compute_ms[0]}, forward "
        f"{compute_ms[1]} and backward {compute_ms[2]} ms, and the network about as long as one of "
        f"them, behind backward. A case is {STEPS} steps; a rank's phase, or what a byte takes on "
        "its link, is longer by the share given, and in the case after that nothing is wrong. The "
        "last columns are what a step was said to take without the fault, against the mean of the "
        "healthy cases before and after: medians, and the largest miss.",
        "",
        f"Rank and phase right: {right} of {len(faulty)} ({right / max(1, len(faulty)):.1%}). "
        f"False alarms: {len(alarms)} in {len(undisturbed)} undisturbed cases. Said to take within "
        f"10 % of the healed step: {sum(abs(one.prediction_error) <= 0.1 for one in found)} of "
        f"{len(found)}.",
        "",
        "| phase | longer by | cases | right | a step took, ms | said without, ms | healed, ms "
        "| largest miss |",
        f"|---|{'---:|' * 7}",
        *_rows(faulty, found),
        "",
        *_wrong(faulty, alarms),
        everything.made_with,
    ]
    return "\n".join(lines) + "\n"


def _rows(faulty: Sequence[Watched], found: Sequence[Healed]) -> Iterator[str]:
    kinds = sorted(
        {(PHASES.index(case.fault.phase), case.fault.share) for case in faulty if case.fault}
    )
    for place, share in kinds:
        kind = (PHASES[place], share)
        alike = [case for case in faulty if _kind(case) == kind]
        right = [one for one in found if _kind(one.watched) == kind]
        cells = [
            PHASES[place],
            f"{share:.0%}",
            len(alike),
            sum(case.is_right for case in alike),
            f"{median(case.step_s for case in alike) * 1e3:.1f}",
        ]
        if right:
            misses = [abs(one.prediction_error) for one in right]
            said_s = median(one.watched.found[0].step_without_s for one in right)
            healed_s = median(one.step_s for one in right)
            cells += [f"{said_s * 1e3:.1f}", f"{healed_s * 1e3:.1f}", f"{max(misses):.1%}"]
        else:
            cells += ["none"] * 3
        yield f"| {' | '.join(map(str, cells))} |"


def _kind(case: Watched) -> tuple[str, float] | None:
    return None if case.fault is None else (case.fault.phase, case.fault.share)


def _wrong(faulty: Sequence[Watched], alarms: Sequence[Watched]) -> list[str]:
    """List what was said where it was not right, for whoever wants to know why."""
    wrong = [case for case in faulty if not case.is_right]
    lines = []
    for case in (*wrong, *alarms):
        was = "nothing"
        if case.fault is not None:
            was = f"{case.fault.phase} of rank {case.fault.rank} by {case.fault.share:.0%}"
        said = " ".join(map(str, case.found)) or "nobody"
        lines.append(f"- Case {case.number}: {was} was longer; said: {said}")
    return [*lines, ""] if lines else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--quick", action="store_true", help="a tenth of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and order (default: 0)")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    if options.again:
        everything = msgspec.json.decode(raw.read_bytes(), type=Everything)
    else:
        everything = Everything(made_with=made_with(), cases=measured(options))
        files.write_text(raw, msgspec.json.encode(everything).decode())
    text = page(everything, options.output.name)
    files.write_text(options.output.with_suffix(".md"), text)
    print(text)


def measured(options: argparse.Namespace) -> list[Watched]:
    cases: list[Watched] = []

    def take(watched: Watched) -> None:
        cases.append(watched)
        said = " ".join(map(str, watched.found)) or "nobody"
        print(
            f"{watched.number}: {'right' if watched.is_right else 'WRONG'}, {watched.fault}; step "
            f"{watched.step_s * 1e3:.1f} ms; said: {said}",
            flush=True,
        )

    of_each = CASES_IF_QUICK if options.quick else CASES_OF_EACH
    with (
        TemporaryDirectory(prefix="gradweave-") as folder,
        Cluster(ClusterSpec(nodes=NODES, rate=RATE)) as cluster,
    ):
        question = StragglersQuestion(
            trace=trace(),
            input_s=INPUT_S,
            settling_steps=SETTLING_STEPS,
            steps=STEPS,
            cases=tuple(schedule(of_each, seed=options.seed)),
            folder=folder,
        )
        watch_ranks(cluster, question, rate=RATE, on_case=take)
    return cases


if __name__ == "__main__":
    main()

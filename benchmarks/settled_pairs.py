"""Plans that this checkout settles on against those of another commit's, in turn.

``python benchmarks/settled_pairs.py OUTPUT --against COMMIT``: for each shipped trace our wrapper
plans by itself in a training of this checkout and in one of the other, which goes to a temporary
worktree. When it has settled nothing of planning is left in a step, so the two differ by their
plans alone. These then run in turn on one cluster, and which is first alternates. Writes
OUTPUT.json (every time) and OUTPUT.md (ratios of pairs with 95 % intervals). Thirty pairs take
three to four minutes per trace on two cores, most of them for planning; leave the machine alone
meanwhile. ``--append`` keeps what OUTPUT.json has of other traces.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
from experiments import PAIRS, SHIPPED
from intervals import paired_ratios, with_interval
from made_with import made_with
from msgspec import Struct

from gradweave import Trace, load_trace
from gradweave._src import files
from gradweave._src.bench.jobs import ask
from gradweave._src.bench.training import JOB, OURS, Case, TrainingAnswer, TrainingQuestion
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.plan import Plan
from gradweave._src.runs import RunFolder

ROOT = Path(__file__).parents[1]
NODES, RATE = PAIRS.clusters[0].nodes, PAIRS.clusters[0].rate
# Our wrapper learns by itself; the benchmark would calibrate, too, for other runtimes.
NETWORK = "gtopk-1gbe"
HERE, THERE = "here", "there"
IN_TURN = (HERE, THERE, THERE, HERE)
WARMUP, ITERATIONS = 2, 3


class Planning(Struct, frozen=True, kw_only=True):
    """What both checkouts have settled on, each once, and what its steps took in turn."""

    here_messages: int
    there_messages: int
    here_predicted_s: float
    there_predicted_s: float
    pairs_s: list[tuple[float, float]]  # here and there, neighbours in time


class Compared(Struct, frozen=True, kw_only=True):
    trace: str
    against: str
    made_with: str
    plannings: list[Planning]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--pairs", type=int, default=30, help="of each trace (default: 30)")
    parser.add_argument("--plannings", type=int, default=1, help="of each trace (default: 1)")
    names = sorted(dict(SHIPPED))
    parser.add_argument("--trace", choices=names, action="append", help="default: all")
    parser.add_argument("--append", action="store_true", help="to what OUTPUT.json has")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    found: dict[str, Compared] = {}
    if options.append and raw.exists():
        known = msgspec.json.decode(raw.read_bytes(), type=list[Compared])
        found = {one.trace: one for one in known}
    with worktree(options.against) as there:
        for name in options.trace or names:
            found[name] = compared(name, there, options)
            print(_row(found[name]), flush=True)
            # Kept after each, for a run may be interrupted.
            encoded = msgspec.json.encode(list(found.values()))
            raw.write_bytes(msgspec.json.format(encoded, indent=1))
    text = page(list(found.values()))
    options.output.with_suffix(".md").write_text(text)
    print(text)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check out another commit's files for the length of a block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkout")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compared(name: str, there: Path, options: argparse.Namespace) -> Compared:
    trace = load_trace(name).rescaled(
        forward_s=PAIRS.forward_s, backward_s=PAIRS.backward_s, parameter_scale=dict(SHIPPED)[name]
    )
    pairs = max(len(IN_TURN) // 2, options.pairs // options.plannings)
    return Compared(
        trace=name,
        against=options.against,
        made_with=made_with(),
        plannings=[planned_and_timed(trace, there, pairs) for _ in range(options.plannings)],
    )


def planned_and_timed(trace: Trace, there: Path, pairs: int) -> Planning:
    (here_plan, here_s), (there_plan, there_s) = (settled(path, trace) for path in (ROOT, there))
    return Planning(
        here_messages=len(here_plan.buckets),
        there_messages=len(there_plan.buckets),
        here_predicted_s=here_s,
        there_predicted_s=there_s,
        pairs_s=timed(trace, {HERE: here_plan, THERE: there_plan}, pairs),
    )


def settled(checkout: Path, trace: Trace) -> tuple[Plan, float]:
    """Return the plan that a checkout's wrapper settles on, and what it expects of a step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        files.write(file, trace)
        words = {
            "--trace": file,
            "--runtime": OURS,
            "--network": NETWORK,
            "--nodes": NODES,
            "--rate": RATE,
            "--repeats": 1,
            "--iterations": 1,
            "--output": Path(folder, "runs"),
        }
        arguments = [str(word) for pair in words.items() for word in pair]
        subprocess.run(
            [sys.executable, "-m", "gradweave", "bench", "training", *arguments, "--json"],
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            cwd=checkout,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        (path,) = Path(folder, "runs").iterdir()
        run = RunFolder(path).read()
    return run.plans[OURS], run.predicted[OURS].iteration_s


def timed(trace: Trace, plans: dict[str, Plan], pairs: int) -> list[tuple[float, float]]:
    """Return what a step takes with each of both plans, on a fresh wrapper each time."""
    question = TrainingQuestion(
        trace=trace,
        mode="waiting",
        cases=tuple(Case(runtime=name, plan=plans[name]) for name in IN_TURN),
        warmup=WARMUP,
        iterations=ITERATIONS,
        repeats=pairs // (len(IN_TURN) // 2),
        with_timelines=False,
    )
    answers: list[TrainingAnswer] = []

    def take(text: str) -> None:
        answers.append(msgspec.json.decode(text, type=TrainingAnswer))

    with Cluster(ClusterSpec(nodes=NODES, rate=RATE)) as cluster:
        ask(cluster, JOB, question, on_answer=take)
    found = []
    for neighbours in zip(answers[::2], answers[1::2], strict=True):
        taken_s = {answer.runtime: answer.iteration_s or 0.0 for answer in neighbours}
        if not all(answer.correct for answer in neighbours):
            raise SystemExit(f"gradients of {trace.name} are wrong")
        found.append((taken_s[HERE], taken_s[THERE]))
    return found


def page(found: Sequence[Compared]) -> str:
    lines = [
        "# Settled plans, against another commit's",
        "",
        f"Made by `python benchmarks/settled_pairs.py`: replayed traces on {NODES} emulated nodes "
        f"at {RATE}, forward {PAIRS.forward_s:g} s and backward {PAIRS.backward_s:g} s. Both "
        "checkouts plan by themselves, each in a training of its own, and what they settle on then "
        f"runs in turn, on a fresh wrapper each time: the median of {ITERATIONS} steps. A ratio "
        "is of neighbours: mean and 95 % interval. Predictions are what the wrapper expected of "
        "the plan that it chose, before the step was measured.",
        "",
        "| trace | plannings | pairs | messages, here | there | predicted, ms, here | there "
        "| step, ms, here | there | ratio | commits |",
        f"|---|{'---:|' * 9}---|",
        *map(_row, sorted(found, key=lambda one: one.trace)),
        "",
        *dict.fromkeys(one.made_with for one in found),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Compared) -> str:
    pairs_s = [pair for planning in one.plannings for pair in planning.pairs_s]
    here_s, there_s = zip(*pairs_s, strict=True)
    commit = one.made_with.split()[1].strip(",")
    cells = [
        one.trace,
        len(one.plannings),
        len(pairs_s),
        _each(planning.here_messages for planning in one.plannings),
        _each(planning.there_messages for planning in one.plannings),
        _each(round(planning.here_predicted_s * 1e3) for planning in one.plannings),
        _each(round(planning.there_predicted_s * 1e3) for planning in one.plannings),
        f"{median(here_s) * 1e3:.0f}",
        f"{median(there_s) * 1e3:.0f}",
        with_interval(paired_ratios(here_s, there_s)),
        f"{commit}, {one.against}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _each(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    main()

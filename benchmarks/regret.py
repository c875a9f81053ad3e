"""What planning costs on its way to a plan: ``python benchmarks/regret.py OUTPUT``.

Replayed traces and a real model are trained for some steps under torch's wrapper, under torch's
wrapper with the best of many caps, under ours, and under ours with a plan that was remembered; in
each run all take their turns on one cluster, for equally many steps. Writes OUTPUT.json (the end of
every step, after each run), OUTPUT.md (tables) and OUTPUT.svg (time over steps). Five runs of all
cases take about four hours on two cores; leave the machine alone meanwhile.

``--append`` keeps what OUTPUT.json has and measures what is missing of it, so an interrupted
command can be repeated and other clusters can be added; ``--again`` measures nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from made_with import made_with
from msgspec.structs import replace
from regret_cases import CASES, STEPS, Case
from regret_page import Everything, Measured, draw, page

from gradweave._src import files
from gradweave._src.bench.peer_plans import TORCH, TUNED
from gradweave._src.bench.regret import CACHED, RUNTIMES, RegretQuestion, Turn, train_in_turn
from gradweave._src.bench.training import OURS
from gradweave._src.errors import GradweaveError, LabError
from gradweave._src.lab import Cluster, ClusterSpec


class Record:
    """OUTPUT.json: every run that is over is in it."""

    def __init__(self, file: Path, everything: Everything) -> None:
        self._file, self.everything = file, everything

    def of(self, like: Measured) -> Measured:
        """Return what is known of the same case for as many steps on the same cluster."""
        known = (one for one in self.everything.measured if one.is_like(like))
        return next(known, like)

    def keep(self, measured: Measured) -> None:
        others = [one for one in self.everything.measured if not one.is_like(measured)]
        self.everything = replace(self.everything, measured=[*others, measured])
        files.write_text(self._file, msgspec.json.encode(self.everything).decode())


def measure(case: Case, known: Measured, record: Record, *, runs: int, wanted: list[str]) -> None:
    """Measure what is missing of so many runs of these runtimes."""
    done = [run for run in known.runs if {turn.runtime for turn in run} >= set(wanted)]
    if len(done) >= runs:
        return
    now = made_with()
    # Runs that are known may have been made with something else.
    together = known.made_with if now in known.made_with else f"{known.made_with} {now}".strip()
    measured = replace(known, made_with=together)
    caps_mb = [turn.bucket_cap_mb for run in known.runs for turn in run if turn.runtime == TUNED]
    turns: list[Turn] = []

    def take(turn: Turn) -> None:
        nonlocal measured
        if not turn.correct:
            raise LabError(f"{turn.runtime} computes wrong gradients")
        turns.append(turn)
        print(
            f"{case.name}, {known.cluster}, run {len(measured.runs) + 1}: {turn.runtime} took "
            f"{turn.total_s:.1f} s",
            flush=True,
        )
        if len(turns) == len(wanted):
            measured = replace(measured, runs=[*measured.runs, tuple(turns)])
            turns.clear()
            record.keep(measured)

    with (
        TemporaryDirectory(prefix="gradweave-") as cache,
        Cluster(ClusterSpec(nodes=known.nodes, rate=known.rate)) as cluster,
    ):
        question = RegretQuestion(
            work=case.work,
            runtimes=tuple(wanted),
            steps=known.steps,
            runs=runs - len(done),
            cache=cache,
            sweeps=not caps_mb,
            bucket_cap_mb=caps_mb[0] if caps_mb else None,
        )
        train_in_turn(cluster, question, on_turn=take)


def measure_all(cases: Sequence[Case], record: Record, options: argparse.Namespace) -> list[str]:
    """Measure all cases and return those that failed, of which what was measured is kept."""
    asked = {TORCH, *(options.runtime or RUNTIMES)}
    wanted = [name for name in RUNTIMES if name in asked or (name == OURS and CACHED in asked)]
    failed = []
    for case in cases:
        spec = case.spec or ClusterSpec(nodes=options.nodes, rate=options.rate)
        measured = Measured(
            case=case.name,
            title=case.title,
            nodes=spec.nodes,
            rate=str(spec.rate),
            steps=options.steps,
            made_with="",
            runs=[],
        )
        try:
            measure(case, record.of(measured), record, runs=options.runs, wanted=wanted)
        except GradweaveError as error:
            print(f"{case.name}, {measured.cluster}: {error}", file=sys.stderr, flush=True)
            failed.append(case.name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--runtime", choices=RUNTIMES, action="append", help="default: all")
    parser.add_argument("--nodes", type=int, default=4, help="default: 4")
    parser.add_argument("--rate", default="1gbit", help="default: 1gbit")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--runs", type=int, default=5, help="of each case (default: 5)")
    parser.add_argument("--append", action="store_true", help="to what OUTPUT.json has")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    options = parser.parse_args()
    raw = options.output.with_suffix(".json")
    everything = Everything(measured=[])
    if raw.exists() and (options.append or options.again):
        everything = msgspec.json.decode(raw.read_bytes(), type=Everything)
    record = Record(raw, everything)
    failed: list[str] = []
    if not options.again:
        cases = [CASES[name] for name in options.case or CASES]
        failed = measure_all(cases, record, options)
    draw(record.everything, options.output.with_suffix(".svg"))
    text = page(record.everything, options.output.name)
    files.write_text(options.output.with_suffix(".md"), text)
    print(text)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Settled steps of this checkout against those of another commit's, in turn.

``python benchmarks/settled_pairs.py OUTPUT --against COMMIT`` runs `gradweave bench training` with
the wrapper that plans by itself, once with this checkout and once with the other, which goes to a
temporary worktree; which of them is first alternates from pair to pair. Writes OUTPUT.json (every
time) and OUTPUT.md (ratios of pairs with 95 % intervals). A pair takes two to three minutes per
trace on two cores, so thirty pairs of three traces take about four hours; leave the machine alone
meanwhile.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median, stdev

import msgspec
from experiments import PAIRS, SHIPPED
from made_with import made_with
from msgspec import Struct

from gradweave.results import Result

ROOT = Path(__file__).parents[1]
TRACES = ("resnet50", "densenet201", "googlenet-k80")
RUNTIME = "gradweave"
(NODES, RATE), *_ = PAIRS.clusters
# Our wrapper calibrates by itself; the benchmark would, too, for predictions of other runtimes.
NETWORK = "gtopk-1gbe"


class Pair(Struct, frozen=True, kw_only=True):
    """One settled step time of each checkout, measured one after the other."""

    trace: str
    here_s: float
    there_s: float
    here_messages: int
    there_messages: int

    @property
    def ratio(self) -> float:
        return self.here_s / self.there_s


class Everything(Struct, frozen=True, kw_only=True):
    made_with: str
    against: str
    pairs: list[Pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--pairs", type=int, default=30, help="of each trace (default: 30)")
    parser.add_argument("--repeats", type=int, default=3, help="in each run (default: 3)")
    parser.add_argument("--iterations", type=int, default=5, help="in each repeat (default: 5)")
    names = sorted(dict(SHIPPED))
    parser.add_argument("--trace", choices=names, action="append", help="default: three of them")
    options = parser.parse_args()
    pairs: list[Pair] = []
    with worktree(options.against) as there:
        for number in range(options.pairs):
            for trace in options.trace or TRACES:
                began_s = time.monotonic()
                pairs.append(
                    measured(
                        trace,
                        there,
                        is_here_first=number % 2 == 0,
                        repeats=options.repeats,
                        iterations=options.iterations,
                    )
                )
                print(
                    f"pair {number + 1} of {options.pairs}, {trace}: {pairs[-1].ratio:.3f}, took "
                    f"{time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
                # Kept after each, for a run may be interrupted.
                everything = Everything(made_with=made_with(), against=options.against, pairs=pairs)
                raw = msgspec.json.format(msgspec.json.encode(everything), indent=1)
                options.output.with_suffix(".json").write_bytes(raw)
    text = page(everything, repeats=options.repeats, iterations=options.iterations)
    options.output.with_suffix(".md").write_text(text)
    print(text)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Another commit's files, for as long as they are needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkout")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def measured(
    trace: str, there: Path, *, is_here_first: bool, repeats: int, iterations: int
) -> Pair:
    found: dict[Path, Result] = {}
    for checkout in (ROOT, there) if is_here_first else (there, ROOT):
        found[checkout] = settled(checkout, trace, repeats=repeats, iterations=iterations)
    return Pair(
        trace=trace,
        here_s=found[ROOT].iteration_s,
        there_s=found[there].iteration_s,
        here_messages=found[ROOT].messages,
        there_messages=found[there].messages,
    )


def settled(checkout: Path, trace: str, *, repeats: int, iterations: int) -> Result:
    """What the wrapper of that checkout takes when it has settled, in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        words = {
            "--trace": trace,
            "--forward": PAIRS.forward_s,
            "--backward": PAIRS.backward_s,
            "--parameter-scale": dict(SHIPPED)[trace],
            "--runtime": RUNTIME,
            "--network": NETWORK,
            "--nodes": NODES,
            "--rate": RATE,
            "--repeats": repeats,
            "--iterations": iterations,
            "--output": runs,
        }
        arguments = [str(word) for pair in words.items() for word in pair]
        ran = subprocess.run(
            [sys.executable, "-m", "gradweave", "bench", "training", *arguments, "--json"],
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            cwd=checkout,
            stdout=subprocess.PIPE,
            check=True,
        )
    (result,) = msgspec.json.decode(ran.stdout, type=list[Result])
    if not result.correct:
        raise SystemExit(f"{checkout} computes wrong gradients of {trace}")
    return result


def page(everything: Everything, *, repeats: int, iterations: int) -> str:
    lines = [
        "# Settled steps, against another commit's",
        "",
        everything.made_with,
        "",
        f"Made by `python benchmarks/settled_pairs.py --against {everything.against}`: replayed "
        f"traces on {NODES} emulated nodes at {RATE}, forward {PAIRS.forward_s:g} s and backward "
        f"{PAIRS.backward_s:g} s. Each time is of a run of its own, of which both checkouts have "
        f"had their turn: the median of {repeats} repeats of {iterations} iterations, after our "
        "wrapper has settled. In brackets messages, which may differ from run to run. A ratio is "
        "of the two runs of a pair: mean and 95 % interval.",
        "",
        f"| trace | pairs | here, ms | {everything.against}, ms | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for trace in dict.fromkeys(pair.trace for pair in everything.pairs):
        pairs = [pair for pair in everything.pairs if pair.trace == trace]
        here = _times([(pair.here_s, pair.here_messages) for pair in pairs])
        there = _times([(pair.there_s, pair.there_messages) for pair in pairs])
        ratio = _ratio([pair.ratio for pair in pairs])
        lines.append(f"| {trace} | {len(pairs)} | {here} | {there} | {ratio} |")
    return "\n".join(lines) + "\n"


def _times(runs: list[tuple[float, int]]) -> str:
    messages = sorted({messages for _, messages in runs})
    numbers = "/".join(map(str, messages))
    return f"{median(taken_s for taken_s, _ in runs) * 1e3:,.0f} ({numbers})"


def _ratio(ratios: list[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.3f}"
    return f"{mean(ratios):.3f} ± {1.96 * stdev(ratios) / len(ratios) ** 0.5:.3f}"


if __name__ == "__main__":
    main()

"""See it on this machine: what Gradweave gains over torch DDP on an emulated cluster.

Three bars first, then why, then real training, then the planners side by side, and a page to look
at. About three minutes on two cores, without root.
"""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from msgspec import Struct

from gradweave._src import files
from gradweave._src.bench.beside_torch import BesideTorch, train_beside_torch
from gradweave._src.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave._src.bench.peer_plans import TORCH
from gradweave._src.bench.real_training import (
    RealQuestion,
    RealTraining,
    steps_s,
    train_for_real,
    write_run,
)
from gradweave._src.bench.regret import FIRST_STEPS, SETTLED
from gradweave._src.bench.training import (
    OURS,
    Settings,
    compressions_of,
    require_room,
    steps,
    to_measure,
    train_on_cluster,
)
from gradweave._src.checks import why_missing
from gradweave._src.cli.bars import Bar, print_bars
from gradweave._src.cli.tables import print_json, print_table, progress_bar
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.network import Network
from gradweave._src.presets import load_trace
from gradweave._src.report.runtimes import explained, is_lossy
from gradweave._src.results import LossSeries, Result
from gradweave._src.runs import Prediction, RunFolder
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import MIB, count_text, milliseconds

Say = Callable[[str], None]

COMMAND = "gradweave demo"

SPEC = ClusterSpec(nodes=4, rate="1gbit")

# A sixteenth of the parameters at times of a modern accelerator: what training feels like on slow
# Ethernet, in a quarter of a second.
TRACE, PARAMETER_SCALE, FORWARD_S, BACKWARD_S = "resnet50", 1 / 16, 0.075, 0.15

# The planners' comparison; the last one changes what is learnt.
RUNTIMES = (TORCH, OURS, "wfbp", "single", "mgwfbp", "optimal", "gtopk")

SETTINGS = Settings(runtimes=RUNTIMES, mode="waiting", warmup=2, iterations=3, repeats=2)

# Nearly all of its gradients are those of one linear layer, which backward yields first, and which
# torch keeps until the convolutions' come: sent at once, they travel while those are computed.
REAL_SPEC = ClusterSpec(nodes=4, rate="200mbit")
REAL = RealQuestion(
    runtimes=(TORCH, OURS),
    model="small-cnn",
    least_steps=60,
    batch_size=128,
    learning_rate=0.02,
    steps_when_settled=40,
    for_folder=True,
)

# Width and indentation of what is printed.
WIDTH = 80
INDENT = "   "

# Steps that differ by less count as equally fast.
EQUALLY_FAST = 0.01


class FirstLook(Struct, frozen=True, kw_only=True):
    """What an iteration takes, medians of the slowest rank, and what our wrapper says about it."""

    torch_ddp_s: float
    gradweave_s: float
    computing_alone_s: float
    speedup: float
    explanation: str


class Phase(Struct, frozen=True, kw_only=True):
    """Some steps of the real training under both wrappers: medians, and losses at their end."""

    phase: str
    first_step: int  # counted from 1
    last_step: int
    torch_ddp_s: float
    gradweave_s: float
    torch_ddp_loss: float
    gradweave_loss: float


class Training(Struct, frozen=True, kw_only=True):
    """What the real training came to."""

    model: str
    rate: str | None  # None on loopback
    phases: tuple[Phase, ...]
    largest_difference: float  # of losses, in one step

    @property
    def gain(self) -> float:
        """How many times as fast as torch's a step is in the end."""
        return self.phases[-1].torch_ddp_s / self.phases[-1].gradweave_s


class Demo(Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    first_look: FirstLook
    training: Training
    runtimes: list[Result]
    report: str | None  # None where the extra `plots` is not installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="DIR", help="where to write the runs (default: runs/demo-DATE-TIME)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one object: first_look, training, runtimes"
    )


def run(options: argparse.Namespace) -> None:
    say: Say = _silent if options.json else _print
    now = datetime.now()  # noqa: DTZ005 as people read clocks
    folder = Path(options.output or Path("runs", f"demo-{now:%Y%m%d-%H%M%S}"))
    RunFolder(folder / REAL.model).require_room(REAL.runtimes)  # before anything takes minutes
    require_room(RunFolder(folder / TRACE), SETTINGS)
    on_loopback = _has_no_lab(say)
    why_no_page = why_missing("altair", what="the demo's page", extra="plots")
    if why_no_page is not None:
        say(f"There will be no page: {why_no_page}.")

    def cluster_of(spec: ClusterSpec) -> Cluster:
        return Cluster(spec, loopback=on_loopback)

    trace = load_trace(TRACE).rescaled(
        forward_s=FORWARD_S, backward_s=BACKWARD_S, parameter_scale=PARAMETER_SCALE
    )
    _introduce(trace, say, on_loopback=on_loopback)
    with cluster_of(SPEC) as cluster, progress_bar(None, doing="half a minute") as advance:
        beside = train_beside_torch(cluster, trace, SETTINGS, advance=advance)
    first_look = _first_look(beside)
    if not options.json:
        _show_bars(first_look)
    _show_explanation(first_look, say)

    say(_about_real(on_loopback=on_loopback))
    with cluster_of(REAL_SPEC) as cluster:
        with progress_bar(None, doing="training") as advance:
            real = train_for_real(cluster, REAL, advance=advance)
        if real.besides is not None:
            write_run(RunFolder(folder / REAL.model), cluster, real, real.besides, command=COMMAND)
    training = summed_up(real, rate=None if on_loopback else REAL_SPEC.rate)
    if not options.json:
        _show_training(training)

    say(_about_planners())
    with cluster_of(SPEC) as cluster:
        results = _compare(cluster, trace, folder / TRACE, [beside.found])
    if not options.json:
        _show_planners(results)

    report = None if why_no_page is not None else _report(folder)
    if options.json:
        written = None if report is None else str(report)
        done = Demo(first_look=first_look, training=training, runtimes=results, report=written)
        print_json(done)
    page = f"none, for {why_no_page}" if report is None else f"open {report} in a browser"
    say(f"\n5. The page: {page}.\n")
    say(f"{INDENT}Use it: from gradweave import DistributedDataParallel as DDP (docs/runtime.md)")


def _silent(text: str) -> None:
    del text


def _print(text: str) -> None:
    print(text, flush=True)


def _has_no_lab(say: Say) -> bool:
    """Say so and return True where no network can be emulated, so that workers use loopback."""
    try:
        with Cluster(SPEC):
            return False
    except LabError as error:
        say(f"No emulated network here ({error}).")
        say("The workers talk over loopback instead: fast, and all messages cost little, so there")
        say("is little to gain.")
        return True


def _introduce(trace: Trace, say: Say, *, on_loopback: bool) -> None:
    where = f"behind links of {_rate(SPEC)}, emulated on this machine,"
    real = "network, messages and torch are real"
    if on_loopback:
        where, real = "on this machine, over loopback,", "messages and torch are real"
    text = (
        f"{SPEC.nodes} workers {where} train "
        f"{TRACE} in small: {trace.nbytes.sum() / 1e6:.1f} MB of gradients, forward "
        f"{FORWARD_S * 1e3:.0f} ms, backward {BACKWARD_S * 1e3:.0f} ms. Computing is emulated by "
        f"waiting; {real}."
    )
    say(textwrap.fill(text, WIDTH) + "\n")


def _rate(spec: ClusterSpec) -> str:
    text = spec.rate or "any rate"
    return text.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def _first_look(beside: BesideTorch) -> FirstLook:
    return FirstLook(
        torch_ddp_s=median(beside.torch_s),
        gradweave_s=median(beside.ours_s),
        computing_alone_s=median(beside.compute_s),
        speedup=beside.speedup,
        explanation=beside.explanation,
    )


def _show_bars(found: FirstLook) -> None:
    print("1. What one iteration takes, in the median\n")
    rows = (
        ("torch DDP", found.torch_ddp_s, "", "yellow"),
        ("Gradweave by itself", found.gradweave_s, f"{found.speedup:.2f}x as fast", "green"),
        ("computing alone", found.computing_alone_s, "the limit", "blue"),
    )
    print_bars(
        [Bar(name, taken_s, f"{taken_s * 1e3:.0f} ms", note, c) for name, taken_s, note, c in rows]
    )


def _show_explanation(found: FirstLook, say: Say) -> None:
    say("\n2. How: what model.explain() says after that training\n")
    for line in found.explanation.splitlines():
        say(_wrapped(line))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + "  ")


def _about_real(*, on_loopback: bool) -> str:
    links = "over loopback" if on_loopback else f"links of {_rate(REAL_SPEC)}"
    return f"\n3. Real training: a small CNN on Fashion-MNIST, {REAL_SPEC.nodes} workers, {links}\n"


def summed_up(real: RealTraining, *, rate: str | None) -> Training:
    torchs, ours = real.series[TORCH], real.series[OURS]
    pairs = zip(torchs.losses, ours.losses, strict=False)
    return Training(
        model=REAL.model,
        rate=rate,
        phases=tuple(_phases(torchs, ours)),
        largest_difference=max(abs(a - b) for a, b in pairs),
    )


def _phases(torchs: LossSeries, ours: LossSeries) -> list[Phase]:
    """Return the training by phases of our planning, without the first steps, which are slower."""
    begins = [
        max(begin.step, FIRST_STEPS if place == 0 else 0) for place, begin in enumerate(ours.phases)
    ]
    ends = [*(begin.step for begin in ours.phases[1:]), len(ours.steps)]
    return [
        Phase(
            phase=named.stage,
            first_step=named.step + 1,
            last_step=end,
            torch_ddp_s=median(steps_s(torchs)[begin:end]),
            gradweave_s=median(steps_s(ours)[begin:end]),
            torch_ddp_loss=torchs.losses[end - 1],
            gradweave_loss=ours.losses[end - 1],
        )
        for named, begin, end in zip(ours.phases, begins, ends, strict=True)
        if begin < end
    ]


def _show_training(training: Training) -> None:
    phases = training.phases
    print_table(
        f"{INDENT}what Gradweave does, what a step takes meanwhile (median), the loss at the end",
        {
            "phase": [one.phase for one in phases],
            "steps": [f"{one.first_step} to {one.last_step}" for one in phases],
            "torch ms": [milliseconds(one.torch_ddp_s) for one in phases],
            "Gradweave ms": [milliseconds(one.gradweave_s) for one in phases],
            "torch loss": [f"{one.torch_ddp_loss:.4f}" for one in phases],
            "Gradweave loss": [f"{one.gradweave_loss:.4f}" for one in phases],
        },
    )
    print(_wrapped(what_was_gained(training)))
    print(
        _wrapped(
            f"Losses differ by {training.largest_difference:.1e} at most, in any step: sums are "
            "made in another order, nothing else changes."
        )
    )


def what_was_gained(training: Training) -> str:
    last = training.phases[-1]
    if last.phase != SETTLED:
        return "Planning has not settled: this machine is too busy to tell plans apart."
    if training.gain < 1 + EQUALLY_FAST:
        return (
            f"Settled after {last.first_step - 1} steps without a gain this time "
            f"({training.gain:.2f}x): so torch's own buckets were as fast as any plan."
        )
    return (
        f"Settled after {last.first_step - 1} steps: since then a step is {training.gain:.2f}x as "
        "fast as torch's."
    )


def _about_planners() -> str:
    return f"\n4. {TRACE} again, with gradients merged in other ways, all of them taking turns\n"


def _compare(
    cluster: Cluster, trace: Trace, folder: Path, found: Sequence[Prediction]
) -> list[Result]:
    network = _calibrated(cluster)
    with progress_bar(steps(trace, SETTINGS, found), doing="training") as advance:
        return train_on_cluster(
            cluster,
            trace,
            network,
            SETTINGS,
            folder=RunFolder(folder),
            command=COMMAND,
            advance=advance,
            found=found,
        )


def _calibrated(cluster: Cluster) -> Network:
    with progress_bar(None, doing="measuring what messages cost") as advance:
        question = CalibrationQuestion(
            name=f"{SPEC.nodes} nodes at {_rate(SPEC)}",
            ways=to_measure(RUNTIMES),
            largest_bytes=8 * MIB,
            repeats=5,
            compressions=compressions_of(RUNTIMES),
        )
        return calibrate_cluster(cluster, question, advance=advance).beside_nothing()


def _show_planners(results: Sequence[Result]) -> None:
    exact = [row for row in results if not is_lossy(row.runtime)]
    print_table(
        f"{INDENT}medians of an iteration; predicted before; computing alone takes "
        f"{milliseconds(results[0].compute_s)} ms",
        {
            "runtime": [row.runtime for row in exact],
            "messages": [str(row.messages) for row in exact],
            "measured ms": [milliseconds(row.iteration_s) for row in exact],
            "predicted ms": [milliseconds(row.predicted_s) for row in exact],
            "of torch-ddp": [f"{row.speedup:.2f}x" for row in exact if row.speedup],
        },
    )
    for row in exact:
        print(_meaning(row.runtime))
    by_name = {row.runtime: row for row in results}
    if {"optimal", "mgwfbp"} <= set(by_name):
        print("\n" + _wrapped(close_or_not(by_name["optimal"], by_name["mgwfbp"])))
    for row in results:
        if is_lossy(row.runtime):
            print("\n" + _wrapped(_apart(row)))


def _meaning(runtime: str) -> str:
    return textwrap.fill(
        f"{explained(runtime)}.",
        WIDTH,
        initial_indent=f"{INDENT}{runtime:11}",
        subsequent_indent=" " * (len(INDENT) + 11),
    )


def close_or_not(optimal: Result, mgwfbp: Result) -> str:
    """Say why the exact planner and the papers' rule are equally fast, or are not."""
    noise = max(max(row.repeats_s) / min(row.repeats_s) - 1 for row in (optimal, mgwfbp))
    assert mgwfbp.predicted_s is not None
    assert optimal.predicted_s is not None
    expected = mgwfbp.predicted_s / optimal.predicted_s - 1
    found = mgwfbp.iteration_s / optimal.iteration_s - 1
    said = (
        "optimal takes the fewest messages within 1 % of the optimum "
        f"({optimal.messages}; mgwfbp {mgwfbp.messages}). Predicted, mgwfbp takes "
        f"{_more_or_less(expected)} than optimal; measured, {_more_or_less(found)}"
    )
    if abs(found) <= max(noise, EQUALLY_FAST):
        return f"{said}, no more than rounds of one and the same differ ({noise:.1%}): noise."
    why = "the papers' rule is not optimal (docs/merging.md)"
    if found < 0:
        why = "predictions are not that exact"
    return f"{said}, more than rounds of one and the same differ ({noise:.1%}): {why}."


def _more_or_less(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'}"


def _apart(row: Result) -> str:
    return (
        f"Apart, because it changes the training: {row.runtime}, {explained(row.runtime)}: "
        f"{count_text(row.messages, 'message')}, {milliseconds(row.iteration_s)} ms, "
        f"{row.speedup:.2f}x."
    )


def _report(folder: Path) -> Path:
    from gradweave._src.report.folders import read_folders
    from gradweave._src.report.page import make_page

    path = folder / "report.html"
    files.write_text(path, make_page(read_folders([folder / TRACE, *_real_folder(folder)])))
    return path


def _real_folder(folder: Path) -> list[Path]:
    """Return a list of the real training's folder, empty where the wrapper found no plan."""
    return [path for path in (folder / REAL.model,) if path.is_dir()]

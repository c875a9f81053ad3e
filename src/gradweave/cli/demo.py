"""See it on this machine: real training and a replayed ResNet-50 on an emulated cluster.

About three minutes on two cores, without root. It ends with a table and a page to look at.
"""

import argparse
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from gradweave import files
from gradweave.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave.bench.real_training import RealQuestion, train_for_real
from gradweave.bench.training import Settings, compressions_of, steps, to_measure, train_on_cluster
from gradweave.cli.tables import milliseconds, print_json, print_table, progress_bar
from gradweave.errors import LabError
from gradweave.lab import Cluster, ClusterSpec
from gradweave.network import Network
from gradweave.presets import load_trace
from gradweave.results import Losses, LossSeries, Result
from gradweave.runs import RunFolder
from gradweave.vocabulary import MIB

Say = Callable[[str], None]

SPEC = ClusterSpec(nodes=4, rate="1gbit")

LABELS = {"torch-ddp": "torch's wrapper", "gradweave": "Gradweave's wrapper"}
REAL = RealQuestion(
    runtimes=tuple(LABELS),
    model="small-cnn",
    least_steps=120,
    batch_size=16,
    learning_rate=0.02,
)

# An eighth of the parameters at times of a modern accelerator: what training feels like on slow
# Ethernet, in a third of a second.
TRACE, PARAMETER_SCALE, FORWARD_S, BACKWARD_S = "resnet50", 0.125, 0.15, 0.3

RUNTIMES = {
    "torch-ddp": "torch's own buckets: 1 MiB, then 25 MiB",
    "wfbp": "each gradient by itself, as soon as it is ready",
    "single": "all gradients in one message, after backward",
    "mgwfbp": "merged by the rule of the MG-WFBP papers",
    "optimal": "merged by Gradweave's exact planner",
    "gtopk": "only the largest 0.1 % of the gradients (changes the training)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="DIR", help="where to write the runs (default: runs/demo-DATE-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    say: Say = _silent if options.json else print
    now = datetime.now()  # noqa: DTZ005 as people read clocks
    folder = Path(options.output or Path("runs", f"demo-{now:%Y%m%d-%H%M%S}"))
    with _cluster(say) as cluster:
        say(f"\n1. Real training: {REAL.model} on 2,000 images of Fashion-MNIST, 4 workers.\n")
        with progress_bar(2 * REAL.least_steps, doing="training") as advance:
            real = train_for_real(cluster, REAL, advance=advance)
        _show_losses(real, say)
        say(
            "\n2. A larger model: ResNet-50, replayed with an eighth of its parameters (12.8 MB).\n"
            "   Forward takes 150 ms and backward 300 ms, by waiting; network, messages and torch\n"
            "   are real.\n"
        )
        for name, meaning in RUNTIMES.items():
            say(f"   {name:10} {meaning}")
        say("")
        results = _replay(cluster, folder / "resnet50")
    losses = Losses(series=tuple(replace(real[name], label=text) for name, text in LABELS.items()))
    files.write(folder / "resnet50" / "losses.json", losses)
    report = _report(folder)
    if options.json:
        print_json(results)
        return
    _show(results)
    print(f"\nLook at it: open {report} in a browser.")
    print("Use it:     from gradweave import DistributedDataParallel as DDP  (docs/runtime.md)")


def _silent(text: str) -> None:
    del text


def _cluster(say: Say) -> Cluster:
    """Where namespaces are forbidden, on loopback, which is not shaped."""
    try:
        with Cluster(SPEC):
            pass
    except LabError as error:
        say(f"No emulated network here ({error}).")
        say("The workers talk over loopback instead: fast, and all messages cost little.")
        return Cluster(SPEC, loopback=True)
    say("A cluster of 4 nodes with links of 1 Gbit/s, emulated on this machine.")
    return Cluster(SPEC)


def _show_losses(real: Mapping[str, LossSeries], say: Say) -> None:
    pairs = list(zip(*(real[runtime].losses for runtime in REAL.runtimes), strict=True))
    shown = [0, len(pairs) // 4, len(pairs) // 2, len(pairs) - 1]
    say("   step   loss with torch's wrapper   with Gradweave's")
    for step in shown:
        say(f"   {step + 1:4}   {pairs[step][0]:25.4f}   {pairs[step][1]:16.4f}")
    worst = max(abs(a - b) for a, b in pairs)
    say(f"   The largest difference in {len(pairs)} steps is {worst:.1e}: the order of summation.")


def _replay(cluster: Cluster, folder: Path) -> list[Result]:
    trace = load_trace(TRACE).rescaled(
        forward_s=FORWARD_S, backward_s=BACKWARD_S, parameter_scale=PARAMETER_SCALE
    )
    network = _calibrated(cluster)
    settings = Settings(runtimes=tuple(RUNTIMES), mode="waiting", warmup=2, iterations=3, repeats=2)
    with progress_bar(steps(trace, settings), doing="training") as advance:
        return train_on_cluster(
            cluster,
            trace,
            network,
            settings,
            folder=RunFolder(folder),
            command="gradweave demo",
            advance=advance,
        )


def _calibrated(cluster: Cluster) -> Network:
    with progress_bar(None, doing="measuring what messages cost") as advance:
        question = CalibrationQuestion(
            name="4 nodes at 1 Gbit/s",
            ways=to_measure(tuple(RUNTIMES)),
            largest_bytes=16 * MIB,
            repeats=5,
            compressions=compressions_of(tuple(RUNTIMES)),
        )
        return calibrate_cluster(cluster, question, advance=advance).beside_nothing()


def _report(folder: Path) -> Path:
    from gradweave.report.folders import read_folders
    from gradweave.report.page import make_page

    path = folder / "report.html"
    files.write_text(path, make_page(read_folders([str(folder)])))
    return path


def _show(results: list[Result]) -> None:
    print_table(
        "one iteration on 4 workers; computing alone takes "
        f"{milliseconds(results[0].compute_s)} ms; predictions were made before",
        {
            "runtime": [row.runtime for row in results],
            "messages": [str(row.messages) for row in results],
            "measured ms": [milliseconds(row.iteration_s) for row in results],
            "predicted ms": [milliseconds(row.predicted_s) for row in results],
            "speed-up over torch-ddp": [f"{row.speedup:.2f}x" for row in results if row.speedup],
        },
    )

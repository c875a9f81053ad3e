"""Train replayed models under several runtimes, and print predicted and measured times.

Examples:

  gradweave bench training --nodes 4 --rate 1gbit --trace densenet201 --parameter-scale 0.25 \\
      --forward 250ms --backward 500ms --runtime torch-ddp,torch-ddp-tuned,gradweave,wfbp,mgwfbp
  torchrun --nnodes 2 --nproc-per-node 4 … -m gradweave bench training --trace resnet50
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gradweave._src.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave._src.bench.training import (
    Place,
    Settings,
    check_runtimes,
    compressions_of,
    needs_slow_ways,
    require_room,
    steps,
    to_measure,
    train,
    train_on_cluster,
    with_collectives,
)
from gradweave._src.cli.arguments import add_trace_arguments, asked_traces, names, whole_number
from gradweave._src.cli.calibrate import cluster_name
from gradweave._src.cli.clusters import (
    add_cluster_arguments,
    asked_to_measure,
    check_under_torchrun,
    nodes_per_rack,
)
from gradweave._src.cli.tables import percent, print_json, print_line, print_table, progress_bar
from gradweave._src.errors import RequestError
from gradweave._src.lab import Cluster
from gradweave._src.network import Network
from gradweave._src.presets import load_network
from gradweave._src.results import Result
from gradweave._src.runs import RunFolder
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import MIB, file_name, milliseconds

if TYPE_CHECKING:
    from gradweave._src.bench.under_torchrun import Ranks

DEFAULT_RUNTIMES = "torch-ddp,wfbp,single,mgwfbp,optimal"
LARGEST_BYTES = 32 * MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    parser.add_argument(
        "--runtime",
        type=names,
        default=names(DEFAULT_RUNTIMES),
        metavar="R",
        help="what to compare, as `gradweave list runtimes` names and explains them: torch-ddp, "
        "gradweave (its wrapper, which plans by itself), a planner, whose plan that wrapper is "
        f"given, and many more (default: {DEFAULT_RUNTIMES})",
    )
    parser.add_argument(
        "--collective",
        type=names,
        default=[],
        metavar="C",
        help="each planner also by these, planned for what they cost, as the runtime "
        "optimal@blueconnect; any is the cheapest of them for each message",
    )
    parser.add_argument(
        "--mode",
        choices=["waiting", "dispatching"],
        default="waiting",
        help="what the host does while the emulated accelerator computes (default: waiting)",
    )
    parser.add_argument(
        "--network",
        metavar="N",
        help="a calibrated network (default: calibrate the cluster first)",
    )
    count = whole_number(least=1, most=10_000)
    parser.add_argument(
        "--repeats",
        type=count,
        default=3,
        metavar="N",
        help="how often each runtime is timed, in turn (default: 3)",
    )
    parser.add_argument(
        "--iterations",
        type=count,
        default=5,
        metavar="N",
        help="how many iterations each repeat has (default: 5)",
    )
    parser.add_argument(
        "--warmup",
        type=whole_number(least=2, most=10_000),
        default=3,
        metavar="N",
        help="iterations before those; torch builds its buckets in the first two (default: 3)",
    )
    add_cluster_arguments(parser, several=True)
    parser.add_argument(
        "--output", metavar="DIR", help="where to write the run (default: runs/DATE-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    options.runtime = with_collectives(options.runtime, options.collective)
    check_runtimes(options.runtime)
    traces = asked_traces(options)
    settings = Settings(
        runtimes=tuple(options.runtime),
        mode=options.mode,
        warmup=options.warmup,
        iterations=options.iterations,
        repeats=options.repeats,
    )
    folder = _folder(options)
    if options.nodes is None:
        check_under_torchrun(options)
        results = _under_torchrun(options, traces, settings, folder)
        if results is None:  # not on rank 0
            return
    else:
        results = _on_clusters(options, traces, settings, folder)
    if options.json:
        print_json(results)
    else:
        _print(results)
        print_line(f"written to {folder}")


def _on_clusters(
    options: argparse.Namespace, traces: list[Trace], settings: Settings, folder: Path
) -> list[Result]:
    results: list[Result] = []
    specs = [asked_to_measure(options, nodes) for nodes in options.nodes]
    for spec, trace in product(specs, traces):
        require_room(_run_folder(folder, trace, spec.nodes), settings)
    for spec in specs:
        with Cluster(spec, loopback=options.loopback) as cluster:
            network = _network(
                options,
                partial(calibrate_cluster, cluster),
                name=cluster_name(spec),
                rack_nodes=nodes_per_rack(options, spec.nodes),
            )
            for trace in traces:
                with progress_bar(
                    steps(trace, settings), doing=f"{trace.name} on {spec.nodes} nodes"
                ) as advance:
                    results += train_on_cluster(
                        cluster,
                        trace,
                        network,
                        settings,
                        folder=_run_folder(folder, trace, spec.nodes),
                        command=shlex.join(["gradweave", *sys.argv[1:]]),
                        advance=advance,
                    )
    return results


def _under_torchrun(
    options: argparse.Namespace, traces: list[Trace], settings: Settings, folder: Path
) -> list[Result] | None:
    """Train on the ranks that torchrun has started; rank 0 has the results."""
    from gradweave._src.bench.under_torchrun import in_default_group

    def lead(ranks: "Ranks") -> list[Result]:
        place = ranks.place
        for trace in traces:
            require_room(_run_folder(folder, trace, place.nodes), settings)
        network = _network(options, ranks.calibrate, name="calibrated", rack_nodes=None)
        results: list[Result] = []
        for trace in traces:
            with progress_bar(steps(trace, settings), doing=trace.name) as advance:
                results += train(
                    place,
                    ranks.train,
                    trace,
                    network,
                    settings,
                    folder=_run_folder(folder, trace, place.nodes),
                    command=_torchrun_command(place),
                    advance=advance,
                )
        return results

    return in_default_group(lead)


def _torchrun_command(place: Place) -> str:
    """Return torchrun's command line, as far as its ranks can tell."""
    launched = f"torchrun --nnodes {place.nodes} --nproc-per-node {place.ranks_per_node}"
    return f"{launched} -m {shlex.join(['gradweave', *sys.argv[1:]])}"


def _run_folder(folder: Path, trace: Trace, nodes: int) -> RunFolder:
    return RunFolder(folder / file_name(f"{trace.name}-{nodes}-nodes"))


def _folder(options: argparse.Namespace) -> Path:
    if options.output is None:
        return Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}")  # noqa: DTZ005 as people read clocks
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; name one to write to")
    return folder


class Calibrate(Protocol):
    """Finds out what messages cost where training is to run."""

    def __call__(
        self, question: CalibrationQuestion, *, advance: Callable[[], None]
    ) -> Network: ...


def _network(
    options: argparse.Namespace,
    calibrate: Calibrate,
    *,
    name: str,
    rack_nodes: int | None,
) -> Network:
    """Return the network, given or calibrated; with prices of idle cores where the host waits."""
    if options.network is not None:
        network = load_network(options.network)
    else:
        question = CalibrationQuestion(
            name=name,
            ways=to_measure(options.runtime),
            largest_bytes=LARGEST_BYTES,
            repeats=9,
            nodes_per_rack=rack_nodes,
            compressions=compressions_of(options.runtime),
            keeps_slow=needs_slow_ways(options.runtime),
        )
        with progress_bar(None, doing="calibrating") as advance:
            network = calibrate(question, advance=advance)
    return network.beside_nothing() if options.mode == "waiting" else network


def _print(results: list[Result]) -> None:
    print_table(
        "iteration times of the slowest rank, medians; predictions were written before; "
        "speed-up over torch-ddp",
        {
            "trace": [row.trace for row in results],
            "nodes": [str(row.nodes) for row in results],
            "runtime": [_runtime(row) for row in results],
            "messages": [str(row.messages) for row in results],
            "measured ms": [milliseconds(row.iteration_s) for row in results],
            "predicted ms": [milliseconds(row.predicted_s) for row in results],
            "error": [f"{row.prediction_error:+.1%}" for row in results],
            "compute ms": [milliseconds(row.compute_s) for row in results],
            "exposed ms": [milliseconds(row.exposed_s) for row in results],
            "efficiency": [percent(row.efficiency) for row in results],
            "speed-up": [f"{row.speedup:.2f}x" if row.speedup else "" for row in results],
            "correct": ["yes" if row.correct else "NO" for row in results],
        },
    )


def _runtime(row: Result) -> str:
    return (
        row.runtime if row.bucket_cap_mb is None else f"{row.runtime} ({row.bucket_cap_mb:g} MiB)"
    )

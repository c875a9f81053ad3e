"""train replayed models under several runtimes: predicted and measured times"""

import argparse
import shlex
import sys
from datetime import datetime
from pathlib import Path

from gradweave.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave.bench.training import (
    Settings,
    check_runtimes,
    compressions_of,
    steps,
    to_measure,
    train_on_cluster,
)
from gradweave.cli.arguments import add_trace_arguments, asked_traces, names, whole_number
from gradweave.cli.calibrate import cluster_name
from gradweave.cli.clusters import add_cluster_arguments, asked_cluster, nodes_per_rack
from gradweave.cli.tables import milliseconds, percent, print_json, print_table, progress_bar
from gradweave.errors import RequestError
from gradweave.lab import Cluster
from gradweave.network import Network
from gradweave.presets import load_network
from gradweave.results import Result
from gradweave.runs import RunFolder
from gradweave.vocabulary import MIB

DEFAULT_RUNTIMES = "torch-ddp,wfbp,single,mgwfbp,optimal"
LARGEST_BYTES = 32 * MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    parser.add_argument(
        "--runtime",
        type=names,
        default=names(DEFAULT_RUNTIMES),
        metavar="R",
        help="torch-ddp, torch-fp16, torch-bf16 (with torch's hooks that round), each also with "
        "-tuned behind its name (its best bucket_cap_mb, found by trying), powersgd:RANK (torch's "
        "hook), zero (torch's ZeroRedundancyOptimizer), fsdp2 or fsdp2:PLANNER (torch's "
        "fully_shard; a planner groups parameters), gradweave or gradweave:PRECISION (our "
        "wrapper, which plans by itself), a planner, whose plan our wrapper is given, rounded "
        "(planned among messages as they are, in bf16 and in 8 bits), bf16, fp16, int8 (all "
        "messages), topk, gtopk or another exchange, each :DENSITY, sharded or sharded:PLANNER "
        "(overlap in both passes), or bsp-reduce-broadcast, bsp-allreduce, bsp-overlap, each "
        ":COLLECTIVE "
        f"(default: {DEFAULT_RUNTIMES})",
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
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--iterations", type=count, default=5, metavar="N", help="in each repeat (default: 5)"
    )
    parser.add_argument(
        "--warmup",
        type=whole_number(least=2, most=10_000),
        default=3,
        metavar="N",
        help="iterations before those; torch builds its buckets in the first two (default: 3)",
    )
    add_cluster_arguments(parser, under_torchrun=False)
    parser.add_argument(
        "--output", metavar="DIR", help="where to write the run (default: runs/DATE-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
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
    results: list[Result] = []
    for nodes in options.nodes:
        spec = asked_cluster(options, nodes)
        if spec.world_size == 1:
            raise RequestError("one rank sends no messages; give --nodes 2 or more")
        with Cluster(spec, loopback=options.loopback) as cluster:
            network = _network(options, cluster, nodes)
            for trace in traces:
                with progress_bar(
                    steps(trace, settings), doing=f"{trace.name} on {nodes} nodes"
                ) as advance:
                    results += train_on_cluster(
                        cluster,
                        trace,
                        network,
                        settings,
                        folder=RunFolder(folder / f"{trace.name}-{nodes}-nodes"),
                        command=shlex.join(["gradweave", *sys.argv[1:]]),
                        advance=advance,
                    )
    if options.json:
        print_json(results)
    else:
        _print(results)
        print(f"written to {folder}")


def _folder(options: argparse.Namespace) -> Path:
    if options.output is None:
        return Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}")  # noqa: DTZ005 as people read clocks
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; name one to write to")
    return folder


def _network(options: argparse.Namespace, cluster: Cluster, nodes: int) -> Network:
    """What was calibrated, as the runtimes will find it: a host that waits leaves cores idle."""
    if options.network is not None:
        network = load_network(options.network)
    else:
        with progress_bar(None, doing=f"calibrating {nodes} nodes") as advance:
            network = calibrate_cluster(
                cluster,
                CalibrationQuestion(
                    name=cluster_name(cluster.spec),
                    ways=to_measure(options.runtime),
                    largest_bytes=LARGEST_BYTES,
                    repeats=9,
                    nodes_per_rack=nodes_per_rack(options, nodes),
                    compressions=compressions_of(options.runtime),
                ),
                advance=advance,
            )
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

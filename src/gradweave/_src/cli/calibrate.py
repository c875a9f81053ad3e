"""Calibrate a network: what messages cost, idle and beside compute, on an emulated or real cluster.

Examples:

  gradweave calibrate --nodes 4 --rate 1gbit --output network.json
  torchrun --nnodes 4 … -m gradweave calibrate --output network.json
"""

import argparse
from pathlib import Path

from gradweave._src import collectives, files
from gradweave._src.bench.calibration import CalibrationQuestion, calibrate_cluster
from gradweave._src.cli.arguments import add_operation_argument, names, whole_number
from gradweave._src.cli.clusters import (
    add_cluster_arguments,
    asked_to_measure,
    check_under_torchrun,
    nodes_per_rack,
)
from gradweave._src.cli.parser import told
from gradweave._src.cli.tables import print_json, print_line, print_note, print_table, progress_bar
from gradweave._src.costs import Curve, Fit, fit
from gradweave._src.errors import RequestError
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.travel import parse_travel
from gradweave._src.vocabulary import (
    MIB,
    alternatives,
    milliseconds,
    parse_bytes,
    parse_spec,
)

# A line that is wrong by more than this somewhere does not describe the points.
WORST_RESIDUAL = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to time", "several are separated by commas")
    add_operation_argument(what)
    what.add_argument(
        "--algorithm",
        type=names,
        default=["native"],
        metavar="A",
        help="native, any of ours (`gradweave list collectives`), or all; all-reduces also "
        "rounded, as ring+bf16 and ring+int8 (default: native)",
    )
    what.add_argument(
        "--largest",
        type=told(parse_bytes),
        default="16MiB",
        metavar="S",
        help="the largest message, with its unit (default: 16MiB)",
    )
    what.add_argument(
        "--repeats",
        type=whole_number(least=1, most=1000),
        default=7,
        metavar="N",
        help="how often each is timed (default: 7)",
    )
    add_cluster_arguments(parser)
    parser.add_argument("--name", help="the network's name (default: from the cluster)")
    parser.add_argument("--output", metavar="FILE", help="write the network to this file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    algorithms = _algorithms(options)
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise RequestError(f"there is no folder to write {options.output} to; make it first")
    if options.nodes is None:
        check_under_torchrun(options)
        network = _under_torchrun(
            _question(options, algorithms, options.name or "calibrated", None)
        )
        if network is None:  # not on rank 0
            return
    else:
        if len(options.nodes) > 1:
            raise RequestError("a calibration is of one cluster; give one number of --nodes")
        (nodes,) = options.nodes
        spec = asked_to_measure(options, nodes)
        question = _question(
            options, algorithms, options.name or cluster_name(spec), nodes_per_rack(options, nodes)
        )
        with (
            progress_bar(None, doing="calibrating") as advance,
            Cluster(spec, loopback=options.loopback) as cluster,
        ):
            network = calibrate_cluster(cluster, question, advance=advance)
    if options.output is not None:
        files.write(options.output, network)
    if options.json:
        print_json([_row(network, entry) for entry in network.costs])
    else:
        _print(network)
    note_bad_fits(network)


def cluster_name(spec: ClusterSpec) -> str:
    return f"lab-{spec.nodes}x{spec.ranks_per_node}-{spec.rate or 'unshaped'}"


def note_bad_fits(network: Network) -> None:
    """Print one line on stderr for each collective whose costs no straight line describes."""
    for entry in network.costs:
        worst = _fit(entry).worst_residual
        if worst > WORST_RESIDUAL:
            print_note(
                f"a line is wrong by up to {worst:.0%} for {_what(entry)}; "
                "plans use the points, papers' formulas the line"
            )


def _algorithms(options: argparse.Namespace) -> tuple[str, ...]:
    ours = dict.fromkeys(name for op in options.op for name in collectives.names(op))
    if options.algorithm == ["all"]:
        return ("native", *ours)
    for name in options.algorithm:
        travel = parse_travel(name)
        if str(travel) == "native+int8":
            raise RequestError("backends have no sums of 8 bits; take ring+int8")
        if parse_spec(travel.collective).name not in {"native", *ours}:
            others = alternatives(parse_spec(travel.collective).name, ["all", "native", *ours])
            raise RequestError(
                f"no algorithm {name!r}{others}, and all-reduces that are rounded, as ring+bf16"
            )
    return tuple(options.algorithm)


def _question(
    options: argparse.Namespace, algorithms: tuple[str, ...], name: str, rack_nodes: int | None
) -> CalibrationQuestion:
    return CalibrationQuestion(
        name=name,
        ways=collectives.ways(options.op, algorithms),
        largest_bytes=options.largest,
        repeats=options.repeats,
        nodes_per_rack=rack_nodes,
    )


def _under_torchrun(question: CalibrationQuestion) -> Network | None:
    from gradweave._src.bench.calibration_job import in_default_group

    with progress_bar(None, doing="calibrating") as advance:
        return in_default_group(question, advance=advance)


def _fit(entry: CollectiveCost) -> Fit:
    assert isinstance(entry.cost, Curve)
    return fit(entry.cost)


def _what(entry: CollectiveCost) -> str:
    return f"{entry.operation} by {entry.collective} beside {entry.beside}"


def _row(network: Network, entry: CollectiveCost) -> dict[str, object]:
    assert isinstance(entry.cost, Curve)
    fitted = _fit(entry)
    assert network.links is not None
    return {
        "network": network.name,
        "operation": entry.operation,
        "collective": entry.collective,
        "workers": entry.workers,
        "beside": entry.beside,
        "latency_s": entry.latency_s,
        "startup_s": fitted.line.startup_s,
        "s_per_byte": fitted.line.s_per_byte,
        "r_squared": fitted.r_squared,
        "worst_residual": fitted.worst_residual,
        "nbytes": entry.cost.nbytes,
        "measured_s": entry.cost.measured_s,
        "links": [level.link for level in network.links.levels],
    }


def _print(network: Network) -> None:
    assert network.links is not None
    for level in network.links.levels:
        members = "all" if level.members is None else f"{level.members}"
        print_line(
            f"between two of {members} workers: latency {level.link.latency_s * 1e6:,.0f} us, "
            f"{_rate(level.link.s_per_byte)}; adding {_rate(level.link.sum_s_per_byte)}"
        )
    entries = network.costs
    fits = [_fit(entry) for entry in entries]
    sizes = sorted({size for entry in entries for size in _points(entry)})
    shown = [size for size in sizes if all(size in _points(entry) for entry in entries)]
    print_table(
        f"{network.name}: times in ms by message size, and the line a + b M fitted to all points",
        {
            "operation": [entry.operation for entry in entries],
            "algorithm": [entry.collective for entry in entries],
            "beside": [entry.beside for entry in entries],
            **{
                _size(size): [milliseconds(_points(entry)[size]) for entry in entries]
                for size in shown
            },
            "latency ms": [f"{entry.latency_s * 1e3:.2f}" for entry in entries],
            "a ms": [f"{found.line.startup_s * 1e3:.2f}" for found in fits],
            "b ns/B": [f"{found.line.s_per_byte * 1e9:.3f}" for found in fits],
            "R²": [f"{found.r_squared:.4f}" for found in fits],
            "worst": [f"{found.worst_residual:.0%}" for found in fits],
        },
    )


def _rate(s_per_byte: float) -> str:
    return f"{1 / s_per_byte / 1e6:,.1f} MB/s" if s_per_byte else "too fast to tell"


def _points(entry: CollectiveCost) -> dict[int, float]:
    assert isinstance(entry.cost, Curve)
    return dict(zip(entry.cost.nbytes, entry.cost.measured_s, strict=True))


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"

"""The options that say which jobs to look at, and how their text becomes values."""

import argparse
from collections.abc import Callable, Sequence
from typing import get_args

from msgspec.structs import replace

from gradweave._src.checks import LARGEST
from gradweave._src.cli.parser import told
from gradweave._src.compression import parse_compression
from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.planning import PLANNERS, find_planner
from gradweave._src.presets import load_network, load_trace
from gradweave._src.simulation import Case, cases
from gradweave._src.trace import LARGEST_SCALE, Trace
from gradweave._src.vocabulary import Operation, Passes, alternatives, parse_duration


def add_job_arguments(parser: argparse.ArgumentParser, *, planners: str) -> None:
    """Add the options that describe jobs; each may be a list, and all combinations are meant."""
    jobs = _add_jobs(parser)
    jobs.add_argument(
        "--planner",
        metavar="P",
        type=names,
        default=names(planners),
        help=f"{', '.join(PLANNERS)}, explained by `gradweave list planners`; fixed:25MiB and "
        f"optimal:0.05 have arguments (default: {planners})",
    )
    jobs.add_argument(
        "--collective",
        metavar="C",
        type=names,
        default=[None],
        help="ring, double-tree, parameter-server:4, … (default: what the network was measured "
        "with, otherwise ring)",
    )
    jobs.add_argument(
        "--passes",
        metavar="P",
        type=_passes,
        default=["backward"],
        help="backward: all-reduced beside it; both: reduce-scattered beside backward and "
        "all-gathered beside the next forward (default: backward)",
    )
    jobs.add_argument(
        "--compression",
        metavar="C",
        type=told(parse_compression),
        help="topk:0.001, gtopk:0.001 (as in training) or gtopk-tree:0.001 (the paper's): the "
        "share of the elements that travels; or bf16, fp16, int8, to which all are rounded",
    )
    _add_changes(parser)


def add_models_on_networks(parser: argparse.ArgumentParser) -> None:
    """Add the options for models and networks, for verbs that find the plans by themselves."""
    _add_jobs(parser)
    _add_changes(parser)


def _add_jobs(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    jobs = parser.add_argument_group("jobs", "several names or numbers are separated by commas")
    _add_trace(jobs)
    jobs.add_argument(
        "--network",
        required=True,
        metavar="N",
        type=names,
        help="network files or shipped networks, as `gradweave list networks` names them",
    )
    jobs.add_argument(
        "--workers",
        metavar="W",
        type=worker_counts,
        help="numbers of workers (default: as many as the network was measured with)",
    )
    jobs.add_argument(
        "--selection",
        metavar="T",
        type=told(parse_duration),
        help="time to select what travels, for each element, such as 2ns (default: what the "
        "network file says)",
    )
    return jobs


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, for verbs that need no network."""
    jobs = parser.add_argument_group("models", "several names are separated by commas")
    _add_trace(jobs)
    _add_changes(parser)


def _add_changes(parser: argparse.ArgumentParser) -> None:
    change = parser.add_argument_group("changing the traces")
    change.add_argument(
        "--bytes-per-element",
        metavar="N",
        type=_widths,
        default=[None],
        help="width of gradients, 2 for mixed precision; several are separated by commas",
    )
    change.add_argument(
        "--forward", metavar="T", type=_time, help="rescale forward to this time, such as 150ms"
    )
    change.add_argument(
        "--backward", metavar="T", type=_time, help="rescale backward to this time, such as 300ms"
    )
    change.add_argument(
        "--parameter-scale",
        metavar="X",
        type=number(above=0, most=LARGEST_SCALE),
        default=1.0,
        help="keep the tensors and multiply their sizes by X",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        required=True,
        metavar="T",
        type=names,
        help="trace files or shipped traces, as `gradweave list traces` names them",
    )


def add_operation_argument(group: argparse._ArgumentGroup) -> None:
    """Add the option for what messages do, for verbs that time them."""
    group.add_argument(
        "--op",
        type=_operations,
        default=["all-reduce"],
        metavar="O",
        help=f"operations: {', '.join(get_args(Operation))} (default: all-reduce)",
    )


def asked_traces(options: argparse.Namespace) -> list[Trace]:
    """Return the traces that were named, changed as asked for."""
    return [
        _changed(load_trace(name), options, width)
        for name in options.trace
        for width in options.bytes_per_element
    ]


def asked_networks(options: argparse.Namespace) -> list[Network]:
    """Return the networks that were named, changed as asked for."""
    networks = [load_network(name) for name in options.network]
    if options.selection is None:
        return networks
    return [replace(n, selection_s_per_element=options.selection) for n in networks]


def asked_workers(options: argparse.Namespace, networks: Sequence[Network]) -> Sequence[int]:
    counts: Sequence[int] | None = options.workers
    return counts or _only_number_of_workers(networks)


def asked_cases(options: argparse.Namespace) -> list[Case]:
    for name in options.planner:
        find_planner(name)  # before the first of many cases is computed for nothing
    networks = asked_networks(options)
    return cases(
        asked_traces(options),
        networks,
        workers=asked_workers(options, networks),
        planners=options.planner,
        collectives=options.collective,
        compression=options.compression,
        passes=options.passes,
    )


def _changed(trace: Trace, options: argparse.Namespace, width: int | None) -> Trace:
    trace = trace.rescaled(
        forward_s=options.forward,
        backward_s=options.backward,
        parameter_scale=options.parameter_scale,
    )
    return trace if width is None else trace.with_bytes_per_element(width)


def _only_number_of_workers(networks: Sequence[Network]) -> tuple[int, ...]:
    match list({network.known_workers for network in networks}):
        case [(only,)]:
            return (only,)
    raise RequestError("--workers is missing; say how many, such as --workers 4")


def names(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"an empty name in {text!r}")
    return parts


def _operations(text: str) -> list[str]:
    return _known(text, get_args(Operation), "operation")


def _passes(text: str) -> list[str]:
    return _known(text, get_args(Passes), "passes")


def _known(text: str, known: Sequence[str], what: str) -> list[str]:
    found = names(text)
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {what} {name!r}{alternatives(name, known)}")
    return found


def worker_counts(text: str) -> list[int]:
    return _whole_numbers(text, whole_number(least=1))


def _widths(text: str) -> list[int]:
    return _whole_numbers(text, whole_number(least=1, most=16))


def _whole_numbers(text: str, parse: Callable[[str], int]) -> list[int]:
    try:
        return [parse(part) for part in names(text)]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; commas separate several, as in 4,8") from None


def whole_number(*, least: int, most: int = 1_000_000) -> Callable[[str], int]:
    def parse(text: str) -> int:
        is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not is_short or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {text[:40]!r}"
            )
        return int(text)

    return parse


def number(
    *, above: float | None = None, least: float = 0.0, most: float = LARGEST
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if above is not None and not above < found <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number above {above:g}, at most {most:g}, got {text[:40]!r}"
            )
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number from {least:g} to {most:g}, got {text[:40]!r}"
            )
        return found

    return parse


@told
def _time(text: str) -> float:
    """Return a time of computing, which must be more than none."""
    seconds = parse_duration(text)
    if seconds == 0:
        raise RequestError(f"expected a duration above 0, got {text!r}")
    return seconds

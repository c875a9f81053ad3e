"""Time how long it takes to select the largest gradients.

Examples:

  gradweave bench select
  gradweave bench select --numel 1000000 --density 0.01 --method torch-topk,threshold
"""

import argparse

import msgspec

from gradweave._src.checks import why_missing
from gradweave._src.cli.arguments import names, number, whole_number
from gradweave._src.cli.tables import print_json, print_note, print_table, progress_bar
from gradweave._src.vocabulary import milliseconds

RESNET50 = 25_557_032
MOST_ELEMENTS = 2 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = whole_number(least=1)
    parser.add_argument(
        "--numel",
        type=whole_number(least=1, most=MOST_ELEMENTS),
        default=RESNET50,
        metavar="N",
        help=f"float32 elements to select from (default: {RESNET50}, those of ResNet-50)",
    )
    parser.add_argument(
        "--density",
        type=number(above=0, most=1),
        default=0.001,
        metavar="D",
        help="share that is selected (default: 0.001)",
    )
    parser.add_argument(
        "--method",
        type=names,
        metavar="M",
        help="methods: radix, threshold, torch-topk, sampled, gaussian (default: all)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=7,
        metavar="N",
        help="how often each is timed, in turn (default: 7)",
    )
    parser.add_argument(
        "--threads",
        type=count,
        default=1,
        metavar="N",
        help="threads that torch may use (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    from gradweave._src.sparse.select import SELECTIONS
    from gradweave._src.sparse.timing import time_selections

    methods = options.method or list(SELECTIONS)
    why = why_missing("numba", what="selection by radix", extra="sparse")
    if why is not None and options.method is None:
        print_note(f"without radix: {why}")
        methods.remove("radix")
    with progress_bar(len(methods) * (options.repeats + 1), doing="selecting") as advance:
        timings = time_selections(
            methods,
            numel=options.numel,
            density=options.density,
            repeats=options.repeats,
            threads=options.threads,
            on_timed=advance,
        )
    if options.json:
        print_json([msgspec.to_builtins(timing) for timing in timings])
        return
    print_table(
        f"adding, selecting and taking out {timings[0].k:,} of {options.numel:,} elements",
        {
            "method": [timing.method for timing in timings],
            "median ms": [milliseconds(timing.median_s) for timing in timings],
            "exact": ["yes" if timing.exact else "no" for timing in timings],
            "times as fast": [
                "" if timing.ratio is None else f"{timing.ratio:.1f}" for timing in timings
            ],
        },
    )

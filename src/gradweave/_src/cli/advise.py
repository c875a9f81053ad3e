"""Compare other ways to train this model on this network.

They are other buckets, passes, precisions, batches and workers. For every trace, network and number
of workers it says what a step would take and how many samples it would train on in a second, what a
rank keeps for its model (parameters, gradients, buckets, Adam's state; without activations), what
changes in the results, and the code for it. Example:

  gradweave advise --trace bert-base --network k80-10gbe --workers 16
"""

import argparse
from itertools import product

from gradweave._src.advice import Advice, advise
from gradweave._src.cli import arguments
from gradweave._src.cli.tables import (
    note_extrapolations,
    print_json,
    print_line,
    print_table,
    progress,
)
from gradweave._src.vocabulary import milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_models_on_networks(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    traces, networks = arguments.asked_traces(options), arguments.asked_networks(options)
    jobs = list(product(traces, networks, arguments.asked_workers(options, networks)))
    found = [
        advise(trace, network, workers=workers)
        for trace, network, workers in progress(jobs, doing="comparing")
    ]
    if options.json:
        print_json(found)
    else:
        for advice in found:
            _print(advice)
    note_extrapolations(found)


def _print(advice: Advice) -> None:
    print_table(
        f"{advice.trace} on {advice.network}, {advice.workers} "
        f"worker{'s' if advice.workers > 1 else ''}: what could be done, by prediction",
        {
            "way": [option.name for option in advice.options],
            "step ms": [milliseconds(option.step_s) for option in advice.options],
            "samples/s": [f"{option.samples_per_s:,.0f}" for option in advice.options],
            "of torch-ddp": [f"{option.gain:.2f}x" for option in advice.options],
            "MB per rank": [f"{option.memory_bytes / 1e6:,.0f}" for option in advice.options],
            "changes in results": [option.changes for option in advice.options],
            "switched on by": [option.code for option in advice.options],
        },
    )
    for one in advice.unpriced:
        print_line(f"{one.name} has no price: {one.reason}")
    print_line(advice.why)

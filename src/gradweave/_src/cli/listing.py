"""List the names that other verbs take.

They are those of traces, networks, planners, collectives, compressions and runtimes; traces and
networks may also be files. Examples:

  gradweave list
  gradweave list planners
  gradweave list runtimes --json
"""

import argparse
from collections.abc import Callable, Iterator, Mapping

from gradweave._src import collectives
from gradweave._src.cli.parser import told
from gradweave._src.cli.tables import print_json, print_table
from gradweave._src.compression import COMPRESSION_SUMMARIES
from gradweave._src.errors import RequestError
from gradweave._src.glossary import RUNTIMES
from gradweave._src.planning import PLANNERS, planner_summary
from gradweave._src.presets import load_network, load_trace, network_names, trace_names
from gradweave._src.vocabulary import alternatives

Names = Iterator[tuple[str, str]]  # with one line on each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", nargs="?", metavar="WHAT", type=_kind, help=f"{', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    kinds = KINDS if options.kind is None else {options.kind: KINDS[options.kind]}
    if options.json:
        found = ((kind, *one) for kind, (_, listed) in kinds.items() for one in listed())
        print_json([{"kind": kind, "name": name, "summary": text} for kind, name, text in found])
        return
    for kind, (takes, listed) in kinds.items():
        entries = list(listed())
        print_table(
            f"{kind}, for {takes}",
            {"name": [name for name, _ in entries], "what it is": [text for _, text in entries]},
        )


def _traces() -> Names:
    for name in trace_names():
        trace = load_trace(name)
        yield name, f"{trace.summary}, batch of {trace.batch_size}, {trace.origin} times"


def _networks() -> Names:
    for name in network_names():
        yield name, load_network(name).source


def _planners() -> Names:
    for name, planner in PLANNERS.items():
        example = "" if planner.example is None else f" ({name}:{planner.example})"
        yield name, f"{planner_summary(name)}{example}"


def _collectives() -> Names:
    for name, summary in collectives.SUMMARIES.items():
        yield name, f"{summary} ({', '.join(collectives.operations_of(name))})"


def _compressions() -> Names:
    yield from COMPRESSION_SUMMARIES.items()


def _runtimes() -> Names:
    yield from RUNTIMES.items()


# For each kind: the options that take such names, and a function that finds them.
KINDS: Mapping[str, tuple[str, Callable[[], Names]]] = {
    "traces": ("--trace", _traces),
    "networks": ("--network", _networks),
    "planners": ("--planner", _planners),
    "collectives": ("--collective and --algorithm", _collectives),
    "compressions": ("--compression; thinned out ones with a share, as gtopk:0.001", _compressions),
    "runtimes": ("bench training --runtime", _runtimes),
}


@told
def _kind(text: str) -> str:
    if text not in KINDS:
        raise RequestError(f"no list of {text!r}{alternatives(text, KINDS)}")
    return text

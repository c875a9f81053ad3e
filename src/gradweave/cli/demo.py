"""See how one job scales from 4 to 2048 workers, simulated: a table and a plot."""

import argparse
import sys
from collections.abc import Sequence

from gradweave.cli.tables import percent, print_json, print_table, progress
from gradweave.presets import load_network, load_trace
from gradweave.simulation import PAPER_WORKERS, Outcome, cases
from gradweave.simulation import run as run_case

PLANNERS = {
    "wfbp": "one message per layer, sent as soon as it is ready",
    "single": "one message for everything, after backward",
    "ddp": "torch's default buckets: 1 MiB, then 25 MiB",
    "mgwfbp": "merged by the rule of the MG-WFBP papers",
    "optimal": "merged by Gradweave: no merging ends earlier (within 1 %)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    todo = cases(
        [load_trace("googlenet-k80")],
        [load_network("k80-10gbe")],
        workers=PAPER_WORKERS,
        planners=list(PLANNERS),
        collectives=["ring"],
    )
    outcomes = [run_case(case).outcome for case in progress(todo, doing="simulating")]
    if options.json:
        print_json(outcomes)
        return
    print(
        "Training GoogLeNet on K80 GPUs (layer times measured) over 10 Gbit/s Ethernet with ring\n"
        "all-reduce (simulated). How much of the ideal speed-up is left when gradients travel as\n"
    )
    for name, meaning in PLANNERS.items():
        print(f"  {name:8} {meaning}")
    print()
    by_planner = {name: [o for o in outcomes if o.planner == name] for name in PLANNERS}
    print_table(
        "scaling efficiency",
        {
            "workers": [str(count) for count in PAPER_WORKERS],
            **{name: [percent(o.efficiency) for o in row] for name, row in by_planner.items()},
        },
    )
    print(_plot(by_planner))
    best = max(PAPER_WORKERS, key=lambda count: _gain(outcomes, count))
    print(
        f"\nAt {best} workers Gradweave's merging trains {_gain(outcomes, best):.2f} times as fast "
        "as the best of the others.\n"
        "Next: gradweave simulate --help, gradweave plan --help, docs/results.md"
    )


def _gain(outcomes: Sequence[Outcome], workers: int) -> float:
    here = [outcome for outcome in outcomes if outcome.workers == workers]
    ours_s = next(outcome.iteration_s for outcome in here if outcome.planner == "optimal")
    others_s = min(outcome.iteration_s for outcome in here if outcome.planner != "optimal")
    return others_s / ours_s


def _plot(by_planner: dict[str, list[Outcome]]) -> str:
    """Each line is drawn with its planner's first letter, so that it can do without colour."""
    import plotext  # slow to import

    places = list(range(len(PAPER_WORKERS)))
    plotext.limit_size(False, False)  # noqa: FBT003
    plotext.plotsize(96, 24)
    for name, row in by_planner.items():
        efficiency = [100 * outcome.efficiency for outcome in row]
        plotext.plot(places, efficiency, label=name, marker=name[0])
    plotext.xticks(places, [str(count) for count in PAPER_WORKERS])
    plotext.ylim(0, 100)
    plotext.yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    plotext.title("scaling efficiency over workers")
    if not sys.stdout.isatty():
        plotext.theme("clear")
        return str(plotext.uncolorize(plotext.build()))
    plotext.theme("pro")
    return str(plotext.build())

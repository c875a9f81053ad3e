"""Merge a trace's gradients into messages, and say what an iteration will take.

Example:

  gradweave plan --trace resnet50 --network k80-10gbe --workers 64 --output plan.json
"""

import argparse
from collections.abc import Sequence

from gradweave._src import files
from gradweave._src.cli import arguments
from gradweave._src.cli.tables import note_extrapolations, print_json, print_table
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.simulation import Simulated
from gradweave._src.simulation import run as run_case
from gradweave._src.timeline import Span
from gradweave._src.vocabulary import milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_job_arguments(parser, planners="optimal")
    parser.add_argument("--output", metavar="FILE", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    cases = arguments.asked_cases(options)
    if options.output is not None and len(cases) > 1:
        raise RequestError(
            f"--output takes one plan, and these options ask for {len(cases)}; "
            "name one trace, network, number of workers, planner and collective"
        )
    planned = [run_case(case) for case in cases]
    if options.output is not None:
        files.write(options.output, planned[0].plan)
    if options.json:
        print_json([_row(simulated) for simulated in planned])
    else:
        for simulated in planned:
            _print(simulated)
    note_extrapolations(simulated.outcome for simulated in planned)


def _row(simulated: Simulated) -> dict[str, object]:
    outcome = simulated.outcome
    return {
        "trace": outcome.trace,
        "network": outcome.network,
        "workers": outcome.workers,
        "passes": outcome.passes,
        "planner": outcome.planner,
        "collective": outcome.collective,
        "compression": outcome.compression,
        "predicted_s": outcome.iteration_s,
        "buckets": [bucket.tensors for bucket in simulated.plan.buckets],
    }


def _print(simulated: Simulated) -> None:
    outcome, plan = simulated.outcome, simulated.plan
    sent = [span for span in simulated.timeline.spans if span.lane == "communication"]
    gathered = [span for span in sent if span.label.startswith("all-gather")]
    messages = _by_bucket(plan, [span for span in sent if span not in gathered])
    beside = "" if outcome.passes == "backward" else " beside both passes"
    print_table(
        f"{outcome.trace} on {outcome.network}, {outcome.workers} workers, {outcome.planner} by "
        f"{outcome.compression or outcome.collective}{beside}: "
        f"{milliseconds(outcome.iteration_s)} ms an "
        f"iteration, {milliseconds(outcome.exposed_s)} ms of it waiting for the network",
        {
            "message": [str(number + 1) for number in range(len(messages))],
            "tensors": [str(len(spans[0].tensors)) for spans in messages],
            "first tensor": [spans[0].tensors[0] for spans in messages],
            "last tensor": [spans[0].tensors[-1] for spans in messages],
            "MB": [f"{spans[0].nbytes / 1e6:,.3f}" for spans in messages],
            "sent at ms": [milliseconds(spans[0].start_s) for spans in messages],
            "done at ms": [milliseconds(spans[-1].end_s) for spans in messages],
            **_gathered_at(_by_bucket(plan, gathered)),
        },
    )


def _by_bucket(plan: Plan, spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of each bucket; empty where there is one worker, which sends nothing."""
    phases = [[s for s in spans if s.tensors == bucket.tensors] for bucket in plan.buckets]
    return [found for found in phases if found]


def _gathered_at(messages: Sequence[Sequence[Span]]) -> dict[str, list[str]]:
    """Return when parameters have come back, in the next iteration."""
    if not messages:
        return {}
    return {"gathered at ms": [milliseconds(spans[-1].end_s) for spans in messages]}

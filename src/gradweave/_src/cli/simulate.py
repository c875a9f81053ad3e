"""Predict how a job scales: iteration time, exposed communication, efficiency.

For every trace, network, collective, number of workers, passes and planner: merge the gradients as
the planner says, then simulate one iteration. Examples:

  gradweave simulate --trace resnet50 --network k80-10gbe --workers 4,16,64
  gradweave simulate --trace googlenet-k80 --network k80-10gbe --workers 16,64,256 \\
      --planner wfbp,single,mgwfbp,optimal --collective ring
  gradweave simulate --trace resnet50 --network gtopk-1gbe --workers 4,16,64,256,1024,2048 \\
      --planner optimal --passes backward,both
  gradweave simulate --trace llama-1b --network tiers-100gbe --collective blueconnect:pat \\
      --workers 1000,100000 --failure-hours 50000 --restart 300s --checkpoint 30s

With --chakra the iteration of one such job is also written for other simulators, as a Chakra
execution trace: PREFIX.0.et and so on, a file for each rank.

  gradweave simulate --trace resnet50 --network k80-10gbe --workers 16 --planner optimal \\
      --chakra traces/resnet50
"""

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from gradweave._src.cli import arguments
from gradweave._src.cli.parser import told
from gradweave._src.cli.tables import (
    note_extrapolations,
    percent,
    print_json,
    print_line,
    print_table,
    progress,
)
from gradweave._src.errors import RequestError
from gradweave._src.formats.chakra import write_ranks
from gradweave._src.planning import planner_summary
from gradweave._src.simulation import HOUR_S, Failures, Jitter, Outcome
from gradweave._src.simulation import run as run_case
from gradweave._src.vocabulary import milliseconds, parse_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_job_arguments(parser, planners="ddp,optimal")
    jitter = parser.add_argument_group("workers that differ")
    jitter.add_argument(
        "--jitter",
        type=arguments.number(least=0, most=10),
        default=0.0,
        metavar="X",
        help="standard deviation of each worker's times, as a share of them (default: 0)",
    )
    jitter.add_argument(
        "--stragglers",
        type=arguments.whole_number(least=0),
        default=0,
        metavar="N",
        help="how many workers are slow (default: 0)",
    )
    jitter.add_argument(
        "--slowdown",
        type=arguments.number(least=1, most=1000),
        default=1.5,
        metavar="X",
        help="a straggler takes X times as long (default: 1.5)",
    )
    jitter.add_argument(
        "--iterations",
        type=arguments.whole_number(least=1),
        default=100,
        metavar="N",
        help="how many iterations to average over when workers differ (default: 100)",
    )
    jitter.add_argument(
        "--seed",
        type=arguments.whole_number(least=0),
        default=0,
        metavar="N",
        help="seed of the random numbers (default: 0)",
    )
    parser.add_argument(
        "--chakra",
        metavar="PREFIX",
        type=Path,
        help="write the one job asked for as a Chakra execution trace, a file for each rank",
    )
    failing = parser.add_argument_group("workers that fail")
    failing.add_argument(
        "--failure-hours",
        type=arguments.number(above=0),
        metavar="H",
        help="a worker fails once in so many hours, and stops all of them",
    )
    failing.add_argument(
        "--restart",
        type=told(parse_duration),
        metavar="T",
        help="time from a failure until all train again, such as 300s (default: 0s)",
    )
    failing.add_argument(
        "--checkpoint",
        type=told(parse_duration),
        metavar="T",
        help="time to write a checkpoint, while nobody trains, such as 30s (default: 0s)",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    jitter, failures = _jitter(options), _failures(options)
    cases = arguments.asked_cases(options)
    if options.chakra is not None and len(cases) > 1:
        raise RequestError(
            f"--chakra writes one job, and {len(cases)} are asked for; name one planner, number of "
            "workers and so on"
        )
    outcomes = []
    for case in progress(cases, doing="simulating"):
        simulated = run_case(
            case,
            jitter=jitter,
            iterations=options.iterations,
            seed=options.seed,
            failures=failures,
        )
        outcomes.append(simulated.outcome)
        if options.chakra is not None:
            write_ranks(
                options.chakra,
                case.trace,
                simulated.plan,
                simulated.timeline,
                workers=case.workers,
            )
    if options.json:
        print_json(outcomes)
    else:
        for _, group in groupby(outcomes, _job):
            _print(list(group))
        if failures is not None:
            _print_survival(outcomes)
        _explain(options.planner)
    note_extrapolations(outcomes)


def _explain(planners: Sequence[str]) -> None:
    width = max(map(len, planners))
    for name in dict.fromkeys(planners):
        print_line(f"{name:{width}}  {planner_summary(name)}")


def _jitter(options: argparse.Namespace) -> Jitter | None:
    if options.jitter == 0 and options.stragglers == 0:
        return None
    return Jitter(spread=options.jitter, stragglers=options.stragglers, slowdown=options.slowdown)


def _failures(options: argparse.Namespace) -> Failures | None:
    if options.failure_hours is None:
        if options.restart is not None or options.checkpoint is not None:
            raise RequestError(
                "--restart and --checkpoint are about failures; say how often a worker fails, "
                "such as --failure-hours 50000"
            )
        return None
    return Failures(
        rank_mtbf_s=options.failure_hours * HOUR_S,
        restart_s=options.restart or 0.0,
        checkpoint_s=options.checkpoint or 0.0,
    )


def _print_survival(outcomes: Sequence[Outcome]) -> None:
    survivals = [o.survival for o in outcomes]
    known = [(o, s) for o, s in zip(outcomes, survivals, strict=True) if s is not None]
    print_table(
        "with failures, and a checkpoint as often as is best",
        {
            "trace": [o.trace for o, _ in known],
            "workers": [str(o.workers) for o, _ in known],
            "planner": [o.planner for o, _ in known],
            "fails every": [_long(s.job_mtbf_s) for _, s in known],
            "checkpoint every": [_long(s.interval_s) for _, s in known],
            "goodput": [percent(s.goodput) for _, s in known],
            "of perfect": [percent(s.goodput * o.efficiency) for o, s in known],
            "samples/s": [f"{s.goodput * o.samples_per_s:,.0f}" for o, s in known],
        },
    )


def _long(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.1f} h" if seconds >= HOUR_S else f"{seconds:,.1f} s"


def _job(outcome: Outcome) -> tuple[str, ...]:
    width = "" if outcome.bytes_per_element is None else f"{outcome.bytes_per_element}-byte "
    way = outcome.compression or outcome.collective
    return outcome.trace, outcome.network, f"{width}gradients by {way}"


def _print(outcomes: Sequence[Outcome]) -> None:
    trace, network, way = _job(outcomes[0])
    alone_s = outcomes[0].compute_s
    print_table(
        f"{trace} on {network}, {way}; one worker alone: {milliseconds(alone_s)} ms",
        {
            "workers": [str(o.workers) for o in outcomes],
            "passes": [o.passes for o in outcomes],
            "planner": [o.planner for o in outcomes],
            "messages": [str(o.messages) for o in outcomes],
            "iteration ms": [milliseconds(o.iteration_s) for o in outcomes],
            "exposed ms": [milliseconds(o.exposed_s) for o in outcomes],
            "overlap": [percent(o.overlap) for o in outcomes],
            "efficiency": [percent(o.efficiency) for o in outcomes],
            "speed-up": [f"{o.speedup:,.1f}" for o in outcomes],
            "samples/s": [f"{o.samples_per_s:,.0f}" for o in outcomes],
        },
    )

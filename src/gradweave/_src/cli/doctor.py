"""Check a cluster before training, and say what is wrong and what to do.

It looks at interfaces, links, cores, clocks and versions. Each line at the end is one thing that is
wrong, and what to do about it. Examples:

  torchrun --nnodes 4 … -m gradweave doctor --output doctor.html
  gradweave doctor --nodes 4 --rate 1gbit
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from gradweave._src import files
from gradweave._src.bench.checkup import CheckupQuestion, check_cluster, place_in
from gradweave._src.checks import why_missing
from gradweave._src.cli.clusters import add_cluster_arguments, asked_cluster, check_under_torchrun
from gradweave._src.cli.tables import print_json, print_line, print_table, progress_bar
from gradweave._src.doctor import Checkup, Diagnosis, diagnose
from gradweave._src.doctor.price import sentences
from gradweave._src.doctor.tables import matrices, rank_columns
from gradweave._src.errors import RequestError
from gradweave._src.lab import Cluster
from gradweave._src.vocabulary import parse_duration

TIMEOUT = "30s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=_timeout_s,
        default=TIMEOUT,
        metavar="T",
        help=f"how long to wait for a rank before it counts as missing (default: {TIMEOUT})",
    )
    parser.add_argument("--output", metavar="FILE", help="write a page to this file, too")
    parser.add_argument("--json", action="store_true", help="print everything as one object")


def run(options: argparse.Namespace) -> None:
    if why := why_missing("pyroute2", what="a checkup", extra="lab"):
        raise RequestError(why)
    make_page = None if options.output is None else _page_maker(options.output)
    checkup = _checked(options, CheckupQuestion(timeout_s=options.timeout))
    if checkup is None:  # not on rank 0
        return
    diagnosis = diagnose(checkup)
    if make_page is not None:
        files.write_text(options.output, make_page(diagnosis))
    if options.json:
        print_json(diagnosis)
    else:
        _print(diagnosis)


def _checked(options: argparse.Namespace, question: CheckupQuestion) -> Checkup | None:
    with progress_bar(None, doing="looking") as advance:
        if options.nodes is None:
            check_under_torchrun(options)
            place_in(os.environ)  # before torch is imported for nothing
            from gradweave._src.bench.checkup_job import in_environment

            return in_environment(question, os.environ, advance=advance)
        if len(options.nodes) > 1:
            raise RequestError("a checkup is of one cluster; give one number of --nodes")
        (nodes,) = options.nodes
        with Cluster(asked_cluster(options, nodes), loopback=options.loopback) as cluster:
            return check_cluster(cluster, question, advance=advance)


def _page_maker(output: str) -> Callable[[Diagnosis], str]:
    """Return what makes the page, or refuse before anything is measured for it."""
    if not Path(output).absolute().parent.is_dir():
        raise RequestError(f"there is no folder to write {output} to; make it first")
    try:
        from gradweave._src.report.checkup_page import make_checkup_page
    except ModuleNotFoundError as error:
        raise RequestError(
            f"a page needs {error.name}, which is not installed; pip install 'gradweave[plots]'"
        ) from None
    return make_checkup_page


def _timeout_s(text: str) -> float:
    try:
        found = parse_duration(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= found <= 3600:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"expected 1s to 3600s, got {text!r}")
    return found


def _print(diagnosis: Diagnosis) -> None:
    print_table(diagnosis.summary, rank_columns(diagnosis.checkup))
    for matrix in matrices(diagnosis.checkup):
        print_table(matrix.title, matrix.columns)
    for sentence in sentences(diagnosis.price) if diagnosis.price else ():
        print_line(sentence)
    for finding in diagnosis.findings:
        print_line(f"- {finding.line}")
    if not diagnosis.findings:
        print_line("No problems found.")

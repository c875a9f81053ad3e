"""A script that runs itself on every rank of an emulated cluster, and takes rank 0's answer."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from gradweave._src.lab import Cluster, ClusterSpec, OutputLine

Answer = TypeVar("Answer")


def is_rank() -> bool:
    """Whether the script has been started on a rank, where it is to answer."""
    return "RANK" in os.environ


def run_cases(
    script: str,
    kind: type[Answer],
    *,
    description: str | None,
    cases: Iterable[tuple[int, str]],
    answer: Callable[[], None],
    page: Callable[[Mapping[str, Answer]], str],
) -> None:
    """Answer on a rank; elsewhere ask all clusters, and write what they found and a page of it.

    ``cases`` are the nodes of each cluster and the rate of their links.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path, help="path without suffix")
    if is_rank():
        answer()
        return
    output = parser.parse_args().output
    found = {
        f"{nodes} nodes, {rate}": answer_of(script, kind, nodes=nodes, rate=rate)
        for nodes, rate in cases
    }
    output.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    output.with_suffix(".md").write_text(page(found))


def answer_of(script: str, kind: type[Answer], *, nodes: int, rate: str) -> Answer:
    """Run the script on an emulated cluster, and return what rank 0 prints as JSON."""
    answers: list[Answer] = []

    def take(line: OutputLine) -> None:
        if line.rank == 0 and line.text.startswith("{"):
            answers.append(msgspec.json.decode(line.text, type=kind))

    with Cluster(ClusterSpec(nodes=nodes, rate=rate)) as cluster:
        result = cluster.start([sys.executable, script], on_line=take).wait()
    if result.first_failure is not None:
        raise SystemExit(str(result.first_failure))
    return answers[0]

"""A script that runs itself on every rank of an emulated cluster, and takes rank 0's answer."""

import os
import sys
from typing import TypeVar

import msgspec

from gradweave._src.lab import Cluster, ClusterSpec, OutputLine

Answer = TypeVar("Answer")


def is_rank() -> bool:
    """Whether the script has been started on a rank, where it is to answer."""
    return "RANK" in os.environ


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

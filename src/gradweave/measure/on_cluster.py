"""Measuring on an emulated cluster, from the outside."""

import sys
from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave.errors import LabError
from gradweave.lab import Cluster, ClusterSpec, Line, SentBytes
from gradweave.measure.timings import Question, Timing


class OnCluster(Struct, frozen=True):
    """What was measured, and what crossed the uplinks meanwhile."""

    timings: list[Timing]
    sent: SentBytes | None  # None on loopback


def time_on_cluster(
    spec: ClusterSpec,
    question: Question,
    *,
    loopback: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> OnCluster:
    """Build the cluster, time what is asked for, take it down; ``advance`` marks each timing."""
    timings: list[Timing] = []

    def take(line: Line) -> None:
        if line.rank == 0 and not line.is_error and line.text.startswith("{"):
            timings.append(msgspec.json.decode(line.text, type=Timing))
            advance()

    argument = msgspec.json.encode(question).decode()
    command = [sys.executable, "-m", "gradweave.measure.collectives_job", argument]
    with Cluster(spec, loopback=loopback) as cluster:
        result = cluster.start(command, on_line=take).wait()
        sent = None if loopback else cluster.sent_bytes()
    if result.first_failure is not None:
        last = next((line for line in reversed(result.first_failure.last_lines) if line), "")
        raise LabError(f"{result.first_failure}: {last}")
    return OnCluster(timings, sent)

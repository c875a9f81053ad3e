"""Timing collectives on an emulated cluster, from the outside."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.lab import Cluster, ClusterSpec, SentBytes
from gradweave._src.measure.timings import Question, Timing


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

    def take(text: str) -> None:
        timings.append(msgspec.json.decode(text, type=Timing))
        advance()

    with Cluster(spec, loopback=loopback) as cluster:
        ask(cluster, "gradweave._src.bench.collectives_job", question, on_answer=take)
        sent = None if loopback else cluster.sent_bytes()
    return OnCluster(timings, sent)

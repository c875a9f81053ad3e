"""A cluster on one machine, with real processes and a real, shaped network (docs/lab.md)."""

from gradweave._src.lab import (
    Cluster,
    ClusterSpec,
    Job,
    JobResult,
    OutputLine,
    RankExit,
    Rates,
    SentBytes,
    run_command,
)

__all__ = [
    "Cluster",
    "ClusterSpec",
    "Job",
    "JobResult",
    "OutputLine",
    "RankExit",
    "Rates",
    "SentBytes",
    "run_command",
]

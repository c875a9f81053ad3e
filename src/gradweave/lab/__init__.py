"""The lab: a cluster on one machine, with real processes and a real, shaped network."""

from gradweave.lab.cluster import Cluster
from gradweave.lab.job import Job, JobResult, RankExit
from gradweave.lab.pipes import OutputLine
from gradweave.lab.readings import Rates, SentBytes
from gradweave.lab.run import run_command
from gradweave.lab.spec import ClusterSpec

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

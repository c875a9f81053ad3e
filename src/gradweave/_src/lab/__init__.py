"""The lab: a cluster on one machine, with real processes and a real, shaped network."""

from gradweave._src.lab.cluster import Cluster
from gradweave._src.lab.job import Job, JobResult, RankExit
from gradweave._src.lab.pipes import OutputLine
from gradweave._src.lab.readings import Rates, SentBytes
from gradweave._src.lab.run import run_command
from gradweave._src.lab.spec import ClusterSpec

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

"""One command on a cluster, from its start to its exit code, with its output on ours."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gradweave._src.errors import LabError
from gradweave._src.lab.agents import is_torchrun
from gradweave._src.lab.cluster import Cluster
from gradweave._src.lab.job import GRACE_S, JobResult, RankExit
from gradweave._src.lab.pipes import OutputLine
from gradweave._src.lab.spec import ClusterSpec

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def run_command(spec: ClusterSpec, command: Sequence[str], *, loopback: bool = False) -> int:
    """Run a command on every rank of a cluster of its own, and return its exit code.

    That is the exit code of the first rank that failed, or 0, or 130 after an interrupt. What ranks
    write goes to the streams of this process, marked with the rank. torchrun is started once on
    each node instead, and what its agents write is marked with the node. `gradweave lab` does just
    this.

    Args:
        spec: the cluster to build.
        command: the program and its arguments.
        loopback: run the ranks as ordinary processes, without any shaping.

    Raises:
        LabError: if the cluster cannot be built, such as where user namespaces are forbidden.
        RequestError: if there is no such program.

    Examples:
        >>> spec = gradweave.lab.ClusterSpec(nodes=2)
        >>> gradweave.lab.run_command(spec, ["true"], loopback=True)
        0
    """
    if loopback:
        sys.stderr.write("gradweave lab: on loopback: no links, nothing is shaped\n")
    try:
        result = _run(spec, command, loopback=loopback)
    except KeyboardInterrupt:
        return INTERRUPTED
    if result.first_failure:
        sys.stderr.write(_summary(result.first_failure))
    return result.exit_code


def _run(spec: ClusterSpec, command: Sequence[str], *, loopback: bool) -> JobResult:
    with Cluster(spec, loopback=loopback) as cluster:
        if is_torchrun(command):
            job = cluster.start_agents(command, on_line=partial(_show, "node"))
        else:
            job = cluster.start(command, on_line=partial(_show, "rank"))
        try:
            return job.wait()
        except KeyboardInterrupt:
            with suppress(LabError):  # ranks that do not end in time are ended with the cluster
                job.stop()
                job.wait(2 * GRACE_S)
            raise


def _show(whose: str, line: OutputLine) -> None:
    stream = sys.stderr if line.is_error else sys.stdout
    stream.write(f"[{whose} {line.rank}] {line.text}\n")
    stream.flush()


def _summary(failure: RankExit) -> str:
    lines = failure.last_lines or ("(none)",)
    return "\n  ".join([f"gradweave lab: {failure}; its last lines:", *lines]) + "\n"

"""An emulated cluster for the length of a block: nodes with addresses, links with rates, faults."""

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gradweave._src.errors import LabError, RequestError
from gradweave._src.lab import messages
from gradweave._src.lab.agents import check_agents, node_environments
from gradweave._src.lab.control import Control
from gradweave._src.lab.job import Job
from gradweave._src.lab.messages import Answer, Request, StartRank
from gradweave._src.lab.pipes import OutputLine, RankPipes
from gradweave._src.lab.readings import Rates, SentBytes
from gradweave._src.lab.spec import (
    FIRST_PORT,
    INTERFACE,
    ClusterSpec,
    MeetingPoint,
    agent_environment,
    checked_rate,
    rank_environment,
)

_JOINED_WITHIN_S = 5.0


class Cluster:
    """A cluster of real processes on a real, shaped network, all on this machine and without root.

    It is there for the length of a ``with`` block: whatever ends the block, or this process, ends
    the cluster and everything in it.

    Args:
        spec: what it consists of.
        loopback: run the ranks as ordinary processes; nothing is shaped and no link can be cut.

    Raises:
        LabError: when the block begins, if the cluster cannot be built (user namespaces may be
            forbidden; the error says what to do), and by every method outside of the block.

    Examples:
        >>> spec = gradweave.lab.ClusterSpec(nodes=2)
        >>> with gradweave.lab.Cluster(spec, loopback=True) as cluster:
        ...     result = cluster.start(["sh", "-c", "echo rank $RANK"]).wait(60)
        >>> [exit.last_lines for exit in result.exits]
        [('rank 0',), ('rank 1',)]
    """

    def __init__(self, spec: ClusterSpec, *, loopback: bool = False) -> None:
        self.spec = spec
        self._loopback = loopback
        self._control: Control | None = None
        self._jobs: list[Job] = []

    def __enter__(self) -> Self:
        self._control = Control(loopback=self._loopback)
        try:
            self._ask(messages.Build(self.spec, self._loopback))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[OutputLine], None] | None = None,
        keep_going: bool = False,
        once_per_node: bool = False,
    ) -> Job:
        """Start a command on every rank, and return without waiting for it.

        Args:
            command: the program and its arguments.
            env: what is added to this process's environment.
            on_line: is called for each line that a rank writes, in another thread.
            keep_going: whether the others go on when a rank fails; by default they are ended.
            once_per_node: start it only where each node's first rank would be, and tell it nothing
                of ranks: for launchers, which make ranks themselves.

        Raises:
            RequestError: if there is no such program.
            LabError: outside of the cluster's block, or if a rank cannot be started.
        """
        number = len(self._jobs)
        environments = self._environments(
            number, {**os.environ, **(env or {})}, once_per_node=once_per_node
        )
        return self._start(number, command, environments, on_line=on_line, keep_going=keep_going)

    def start_agents(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[OutputLine], None] | None = None,
        keep_going: bool = False,
    ) -> Job:
        """Start torchrun on every node, where each agent is told of the others.

        What the command says of nodes and where they meet is left as it is.

        Args:
            command: torchrun, or python -m torch.distributed.run, and its arguments.
            env: what is added to this process's environment.
            on_line: is called for each line that an agent writes, in another thread.
            keep_going: whether the others go on when an agent fails; by default they are ended.

        Raises:
            RequestError: if agents could not meet, or would start other ranks than asked for.
            LabError: outside of the cluster's block, or if an agent cannot be started.
        """
        check_agents(command, self.spec)
        number = len(self._jobs)
        environments = node_environments(
            command,
            self.spec,
            base={**os.environ, **(env or {})},
            meeting=self._meeting_point(number),
        )
        return self._start(number, command, environments, on_line=on_line, keep_going=keep_going)

    def _start(
        self,
        number: int,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        *,
        on_line: Callable[[OutputLine], None] | None,
        keep_going: bool,
    ) -> Job:
        """Run the command as each of these ranks, with its environment."""
        pipes: list[RankPipes] = []
        try:
            for request in _start_requests(number, command, environments):
                pipes.append(RankPipes(request.rank))
                self._ask(request, pipes[-1].theirs)
                pipes[-1].close_theirs()
        except BaseException:
            with suppress(LabError):
                self._ask(messages.Stop(number, 0.0))
            for own in pipes:
                own.close_theirs()
                own.close()
            raise
        assert self._control is not None
        job = Job(
            number,
            pipes,
            spec=self.spec,
            control=self._control,
            on_line=on_line,
            keep_going=keep_going,
        )
        self._jobs.append(job)
        return job

    def fail(self, node: int) -> None:
        """Kill the node's ranks.

        Peers see closed connections, or nothing at all if the node's link is cut.
        """
        self._ask(messages.Kill(list(self.spec.ranks_of(node))))

    def cut(self, node: int) -> None:
        """Unplug the node's link: packets are lost in both directions."""
        self._ask(messages.Plug(self._checked(node), plugged=False))

    def heal(self, node: int) -> None:
        """Plug the node's link in again."""
        self._ask(messages.Plug(self._checked(node), plugged=True))

    def set_rate(self, node: int, rate: str) -> None:
        """Hold the node's link to another rate, in both directions.

        Args:
            node: whose link it is.
            rate: a text with unit, "100kbit" to "32gbit".

        Raises:
            RequestError: if there is no such node, or the rate is out of range.
            LabError: on loopback, where no link is shaped.
        """
        self._ask(messages.SetRate(self._checked(node), checked_rate(rate)))

    def rates(self, node: int) -> Rates:
        """Return the rates to which the kernel holds the node's link."""
        rates = self._ask(messages.ReadRates(self._checked(node))).rates
        assert rates is not None
        return rates

    def sent_bytes(self) -> SentBytes:
        """Return what has passed each uplink since the cluster was built."""
        sent = self._ask(messages.ReadSent()).sent
        assert sent is not None
        return sent

    def _ask(self, request: Request, files: Sequence[int] = ()) -> Answer:
        if self._control is None:
            raise LabError("the cluster exists only inside its with-block")
        return self._control.request(request, files)

    def _checked(self, node: int) -> int:
        self.spec.ranks_of(node)
        return node

    def _environments(
        self, job: int, base: Mapping[str, str], *, once_per_node: bool
    ) -> dict[int, dict[str, str]]:
        """Return environments by the ranks as which the command is started."""
        if once_per_node:
            agents = (self.spec.ranks_of(node)[0] for node in range(self.spec.nodes))
            return dict.fromkeys(agents, agent_environment(base))
        meeting = self._meeting_point(job)
        return {
            rank: rank_environment(self.spec, rank, base=base, meeting=meeting)
            for rank in range(self.spec.world_size)
        }

    def _meeting_point(self, job: int) -> MeetingPoint:
        """Return where a job's ranks meet; each job has its own port, for two may run at once."""
        if not self._loopback:
            return MeetingPoint(self.spec.address_of(0), FIRST_PORT + job, INTERFACE)
        with socket.create_server(("127.0.0.1", 0)) as server:
            return MeetingPoint("127.0.0.1", server.getsockname()[1], "lo")

    def _close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()
        for job in self._jobs:
            with suppress(Exception):  # whether it failed or not, its thread has ended then
                job.wait(_JOINED_WITHIN_S)


def _start_requests(
    job: int, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]
) -> list[StartRank]:
    program = _program(command)
    return [
        StartRank(
            job=job,
            rank=rank,
            program=os.fsencode(program),
            arguments=[os.fsencode(argument) for argument in command],
            environment={
                os.fsencode(name): os.fsencode(value) for name, value in environment.items()
            },
            directory=os.fsencode(Path.cwd()),
        )
        for rank, environment in environments.items()
    ]


def _program(command: Sequence[str]) -> str:
    if not command:
        raise RequestError(
            "there is no command to run; write it after --, as in -- python train.py"
        )
    program = shutil.which(command[0])
    if program is None:
        raise RequestError(f"there is no program {command[0]!r} to run")
    return program

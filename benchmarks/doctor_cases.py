"""Whether the doctor names what is wrong: ``python benchmarks/doctor_cases.py OUTPUT``.

Twenty rounds on emulated clusters, each with new processes, in which every case comes once: a
healthy cluster, a node's link at a tenth of its rate, a node that would use its loopback or its
second, slower interface, a rank on one core, two ranks on the same core, racks that share an
uplink, links that are as fast as the cores; where it is, is drawn anew.
Every second round runs beside three busy loops. Writes OUTPUT.json and OUTPUT.md. A quarter of an
hour on two cores.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from ask_ranks import is_rank
from made_with import made_with
from msgspec import Struct
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gradweave._src.bench.checkup import CheckupQuestion
from gradweave._src.bench.checkup_job import check_up, meeting_store
from gradweave._src.doctor import Checkup, diagnose
from gradweave._src.doctor.surroundings import rank_facts
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec, Job, OutputLine

ROUNDS = 20
RATE, TENTH, SECOND_RATE = "1gbit", "100mbit", "100mbit"
BUSY_LOOPS = 3
TIMEOUT_S = 30.0
POLL_S = 0.02

ONE_RANK = ClusterSpec(nodes=4, rate=RATE, second_rate=SECOND_RATE)
TWO_RANKS = ClusterSpec(nodes=2, ranks_per_node=2, rate=RATE)
RACKS = ClusterSpec(nodes=4, rate="200mbit", racks=2, uplink_rate="200mbit")
UNSHAPED = ClusterSpec(nodes=4)
CLUSTERS = (ONE_RANK, TWO_RANKS, RACKS, UNSHAPED)


class Kind(Struct, frozen=True, kw_only=True):
    """One way for a cluster to be, and what the doctor should say of it."""

    name: str
    spec: ClusterSpec
    finding: str | None = None  # None: there must be none
    slow_link: bool = False
    interface: str | None = None
    pinned: bool = False
    everybody: bool = False  # concerns all nodes


KINDS = (
    Kind(name="healthy", spec=ONE_RANK),
    Kind(name="a link at a tenth of the rate", spec=ONE_RANK, finding="slow-host", slow_link=True),
    Kind(name="loopback on one host", spec=ONE_RANK, finding="loopback", interface="lo"),
    Kind(
        name="second interface on one host",
        spec=ONE_RANK,
        finding="other-network",
        interface="eth1",
    ),
    Kind(name="a rank on one core", spec=ONE_RANK, finding="one-core", pinned=True),
    Kind(name="healthy, two ranks on each host", spec=TWO_RANKS),
    Kind(name="two ranks on the same core", spec=TWO_RANKS, finding="shared-core", pinned=True),
    Kind(name="healthy, links not shaped", spec=UNSHAPED),
    Kind(name="racks that share an uplink", spec=RACKS, finding="shared-uplink", everybody=True),
)


class Case(Struct, frozen=True, kw_only=True):
    """A kind, and the node that is concerned."""

    kind: str
    node: int


class Run(Struct, frozen=True, kw_only=True):
    """What came of a case."""

    kind: str
    round: int
    node: int
    beside_busy_loops: bool
    named: bool  # the right finding about the right ranks, or rightly none
    others: int  # findings that should not be there
    lines: list[str]
    took_s: float
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if is_rank():
        run_cases(options.output)
        return
    draw = random.Random(17)  # noqa: S311 which node is nobody's secret
    runs: list[Run] = []
    for number in range(options.rounds):
        for spec in CLUSTERS:
            kinds = [kind for kind in KINDS if kind.spec == spec]
            cases = [Case(kind=kind.name, node=draw.randrange(spec.nodes)) for kind in kinds]
            draw.shuffle(cases)
            is_busy = number % 2 == 1
            with busy_loops(BUSY_LOOPS if is_busy else 0):
                checkups = list(answers(spec, cases))
            runs += [
                judged(case, checkup, number=number, is_busy=is_busy)
                for case, checkup in zip(cases, checkups, strict=True)
            ]
        print(
            f"round {number + 1}: {sum(run.named and not run.others for run in runs)} of "
            f"{len(runs)} right",
            flush=True,
        )
        write(options.output, runs)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    # They end with this process, however it ends.
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def answers(spec: ClusterSpec, cases: Sequence[Case]) -> Iterator[Checkup]:
    """Run all cases in one job of new processes, and yield the checkup of each.

    A case begins when its link is as it should be.
    """
    found: list[Checkup] = []

    def take(line: OutputLine) -> None:
        if line.rank == 0 and not line.is_error and line.text.startswith("{"):
            found.append(msgspec.json.decode(line.text, type=Checkup))

    with TemporaryDirectory(prefix="gradweave-") as name, Cluster(spec) as cluster:
        folder = Path(name)
        (folder / "cases.json").write_bytes(msgspec.json.encode(cases))
        job = cluster.start([sys.executable, __file__, str(folder)], on_line=take)
        for number, case in enumerate(cases):
            is_slow = kind_of(case).slow_link
            if is_slow:
                cluster.set_rate(case.node, TENTH)
            (folder / f"go-{number}").touch()
            while len(found) == number and is_running(job):
                time.sleep(POLL_S)
            if is_slow:
                cluster.set_rate(case.node, RATE)
            yield found[number]
        job.wait(TIMEOUT_S)


def is_running(job: Job) -> bool:
    """Whether the job is still running; SystemExit if it has failed."""
    try:
        failure = job.wait(0).first_failure
    except LabError:
        return True
    if failure is not None:
        raise SystemExit("\n".join([str(failure), *failure.last_lines]))
    return False


def run_cases(folder: Path) -> None:
    """Run every case as it comes, on one rank."""
    cases = msgspec.json.decode((folder / "cases.json").read_bytes(), type=list[Case])
    rank = int(os.environ["RANK"])
    store = meeting_store(os.environ, TIMEOUT_S)
    for number, case in enumerate(cases):
        while not (folder / f"go-{number}").exists():
            time.sleep(POLL_S)
        with as_in(case, rank):
            checkup = check_up(
                PrefixStore(f"case {number}", store),
                rank_facts(os.environ, rank=rank, threads=torch.get_num_threads(), versions={}),
                world_size=int(os.environ["WORLD_SIZE"]),
                where="the store",
                question=CheckupQuestion(timeout_s=TIMEOUT_S),
            )
        if checkup is not None:
            print(msgspec.json.encode(checkup).decode(), flush=True)


@contextmanager
def as_in(case: Case, rank: int) -> Iterator[None]:
    """Set up this rank's own part of what is wrong, for the length of a block."""
    kind = kind_of(case)
    is_concerned = rank in kind.spec.ranks_of(case.node)
    usual_interface, usual_cores = os.environ["GLOO_SOCKET_IFNAME"], os.sched_getaffinity(0)
    if is_concerned and kind.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = kind.interface
    if is_concerned and kind.pinned:
        os.sched_setaffinity(0, {min(usual_cores)})
    yield
    os.environ["GLOO_SOCKET_IFNAME"] = usual_interface
    os.sched_setaffinity(0, usual_cores)


def kind_of(case: Case) -> Kind:
    return next(kind for kind in KINDS if kind.name == case.kind)


def judged(case: Case, checkup: Checkup, *, number: int, is_busy: bool) -> Run:
    kind, findings = kind_of(case), diagnose(checkup).findings
    concerned = tuple(
        range(kind.spec.world_size) if kind.everybody else kind.spec.ranks_of(case.node)
    )
    right = [one for one in findings if (one.kind, one.ranks) == (kind.finding, concerned)]
    return Run(
        kind=case.kind,
        round=number,
        node=case.node,
        beside_busy_loops=is_busy,
        named=len(right) == 1 or (kind.finding is None and not findings),
        others=len(findings) - len(right),
        lines=[one.line for one in findings],
        took_s=checkup.took_s,
        load=checkup.ranks[0].load,
    )


def write(output: Path, runs: Sequence[Run]) -> None:
    output.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(runs)))
    output.with_suffix(".md").write_text(page(runs))


def page(runs: Sequence[Run]) -> str:
    rounds = 1 + max(run.round for run in runs)
    lines = [
        "# What the doctor names",
        "",
        made_with(),
        "",
        f"Made by `python benchmarks/doctor_cases.py`: {rounds} rounds, each with new processes on "
        f"emulated clusters of 4 nodes with one rank or 2 with two, links of {RATE} and a second "
        f"network of {SECOND_RATE} where nothing else is said. Every case comes once in a round, "
        "in an order and on a node that are drawn. Every second round ran beside "
        f"{BUSY_LOOPS} busy loops on the two cores. "
        "Named: the right finding, with exactly the ranks that are concerned; for healthy "
        "clusters: no finding at all. False alarms: any other finding.",
        "",
        "| case | named | beside busy loops | false alarms | seconds, median | longest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        own = [run for run in runs if run.kind == kind.name]
        if not own:
            continue
        busy = [run for run in own if run.beside_busy_loops]
        lines.append(
            f"| {kind.name} | {sum(run.named for run in own)} of {len(own)} "
            f"| {sum(run.named for run in busy)} of {len(busy)} "
            f"| {sum(run.others for run in own)} | {median(run.took_s for run in own):.1f} "
            f"| {max(run.took_s for run in own):.1f} |"
        )
    loads = [run.load for run in runs]
    lines += [
        "",
        "Seconds are those of the checkup, without the start of processes. The machine's load was "
        f"{min(loads):.1f} to {max(loads):.1f}. What it said, once for each case:",
        "",
    ]
    for kind in KINDS:
        said = next((run.lines for run in runs if run.kind == kind.name), [])
        lines += [f"- {kind.name}: {'; '.join(said) or 'nothing found'}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

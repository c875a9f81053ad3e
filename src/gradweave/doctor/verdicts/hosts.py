"""What hosts have for their ranks: cores, threads, versions, clocks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gradweave.doctor import words
from gradweave.doctor.checkup import Checkup
from gradweave.doctor.verdicts.finding import Finding

# A host is busy when it has more to do than cores, and much more than the others have.
BUSY_LOAD_PER_CORE = 1.5
BUSY_BESIDE_OTHERS = 3.0
# A clock that is further off makes logs of several hosts hard to read together.
CLOCK_S = 0.1

UNPIN = (
    "start ranks without taskset or numactl, or give each rank cores of its own (Slurm: "
    "--cpus-per-task; containers: --cpuset-cpus)"
)


def shared_cores(checkup: Checkup) -> Iterator[Finding]:
    """Ranks that may only use the same few cores, while their host has more."""
    for host in checkup.hosts:
        by_cores: dict[tuple[int, ...], list[int]] = {}
        for facts in host.ranks:
            if len(facts.cores) < facts.host_cores:
                by_cores.setdefault(facts.cores, []).append(facts.rank)
        for cores, ranks in by_cores.items():
            if len(ranks) > len(cores):
                yield Finding(
                    kind="shared-core",
                    ranks=tuple(ranks),
                    what=f"{words.ranks(ranks)} on {host.name} share {_cores(cores)} of "
                    f"{host.first.host_cores}",
                    advice=UNPIN,
                )


def one_core(checkup: Checkup) -> Iterator[Finding]:
    """A rank by itself on one core, where there would be several for each rank."""
    for host in checkup.hosts:
        pinned = Counter(facts.cores for facts in host.ranks if len(facts.cores) == 1)
        ranks = [facts.rank for facts in host.ranks if pinned[facts.cores] == 1]
        if ranks and host.first.host_cores // len(host.ranks) > 1:
            one = next(facts for facts in host.ranks if facts.rank == ranks[0])
            yield Finding(
                kind="one-core",
                ranks=tuple(ranks),
                what=f"{words.ranks(ranks)} on {host.name} may use one core each of "
                f"{one.host_cores}"
                if len(ranks) > 1
                else f"rank {one.rank} on {host.name} may use {_cores(one.cores)} alone of "
                f"{one.host_cores}",
                advice=UNPIN,
            )


def threads(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    for host in checkup.hosts:
        if explained & {facts.rank for facts in host.ranks}:
            continue
        cores = {core for facts in host.ranks for core in facts.cores}
        threads = sum(facts.threads for facts in host.ranks)
        if threads <= len(cores):
            continue
        ranks = tuple(facts.rank for facts in host.ranks)
        count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
        best = len(cores) // len(ranks)
        yield Finding(
            kind="threads",
            ranks=ranks,
            what=f"{host.name}: {count} with {threads} threads in all on {len(cores)} "
            f"core{'s' if len(cores) > 1 else ''}",
            advice=f"export OMP_NUM_THREADS={best} there"
            if best
            else "start fewer ranks there, at most one for each core",
        )


def busy(checkup: Checkup) -> Iterator[Finding]:
    """A host that has much more to do than the others, before training has begun."""
    per_core = {host.name: host.first.load / host.first.host_cores for host in checkup.hosts}
    usual = sorted(per_core.values())[(len(per_core) - 1) // 2]
    for host in checkup.hosts:
        if per_core[host.name] > max(BUSY_LOAD_PER_CORE, BUSY_BESIDE_OTHERS * usual):
            yield Finding(
                kind="busy",
                ranks=tuple(facts.rank for facts in host.ranks),
                what=f"{host.name}: load {host.first.load:.1f} on {host.first.host_cores} cores, "
                f"others {usual:.1f} for each core",
                advice="see what else runs there (top)",
            )


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {words.listed([str(core) for core in cores])}"


def versions(checkup: Checkup) -> Iterator[Finding]:
    names = dict.fromkeys(name for facts in checkup.ranks for name in facts.versions)
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host in checkup.hosts:
            version = host.first.versions.get(name, "none")
            hosts.setdefault(version, []).append(host.name)
        if len(hosts) > 1:
            where = "; ".join(
                f"{words.printable(v)} on {words.listed(h)}" for v, h in hosts.items()
            )
            yield Finding(
                kind="versions",
                ranks=tuple(host.first.rank for host in checkup.hosts),
                what=f"{name} differs: {where}",
                advice="install the same everywhere",
            )


def clocks(checkup: Checkup) -> Iterator[Finding]:
    for host in checkup.hosts:
        offset_s = checkup.clock_offsets_s.get(host.first.rank, 0.0)
        if abs(offset_s) > CLOCK_S:
            way = "behind" if offset_s > 0 else "ahead of"
            yield Finding(
                kind="clock",
                ranks=tuple(facts.rank for facts in host.ranks),
                what=f"{host.name}: its clock is {abs(offset_s):,.1f} s {way} rank 0's",
                advice="keep clocks by NTP (timedatectl set-ntp true), or logs of several hosts do "
                "not fit together",
            )

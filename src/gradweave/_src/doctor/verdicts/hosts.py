"""What hosts have for their ranks: cores, threads, versions, clocks."""

from collections.abc import Iterator, Sequence

from gradweave._src.doctor import words
from gradweave._src.doctor.checkup import Checkup, Host, RankFacts
from gradweave._src.doctor.verdicts.finding import Finding

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
    """Name ranks that may only use the same few cores, while their host has more."""
    for host in checkup.hosts:
        for cores, ranks in _pinned(host).items():
            if len(ranks) > len(cores):
                yield Finding(
                    kind="shared-core",
                    ranks=tuple(facts.rank for facts in ranks),
                    what=f"{words.ranks([facts.rank for facts in ranks])} on {host.name} share "
                    f"{_cores(cores)} of {host.first.host_cores}",
                    advice=UNPIN,
                )


def one_core(checkup: Checkup) -> Iterator[Finding]:
    """Name ranks that are bound to one core, where there would be several for each rank."""
    for host in checkup.hosts:
        if host.first.host_cores // len(host.ranks) < 2:  # noqa: PLR2004
            continue
        for cores, ranks in _pinned(host).items():
            if len(cores) == len(ranks) == 1:
                yield Finding(
                    kind="one-core",
                    ranks=(ranks[0].rank,),
                    what=f"rank {ranks[0].rank} on {host.name} may use {_cores(cores)} alone, of "
                    f"{host.first.host_cores}",
                    advice=UNPIN,
                )


def threads(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    """Name hosts with more threads than cores, unless their ranks are known to share cores."""
    for host in checkup.hosts:
        ranks = tuple(facts.rank for facts in host.ranks)
        cores = {core for facts in host.ranks for core in facts.cores}
        wanted = sum(facts.threads for facts in host.ranks)
        if explained & set(ranks) or wanted <= len(cores):
            continue
        each = len(cores) // len(ranks)
        yield Finding(
            kind="threads",
            ranks=ranks,
            what=f"{words.ranks(ranks)} on {host.name} compute with {wanted} threads on "
            f"{len(cores)} core{'s' * (len(cores) > 1)}",
            advice=f"export OMP_NUM_THREADS={each} on {host.name}"
            if each
            else "start at most one rank for each core",
        )


def busy(checkup: Checkup) -> Iterator[Finding]:
    """Name a host that has much more to do than the others, before training has begun."""
    per_core = [host.first.load / host.first.host_cores for host in checkup.hosts]
    usual = sorted(per_core)[(len(per_core) - 1) // 2]
    for host, load in zip(checkup.hosts, per_core, strict=True):
        if load > max(BUSY_LOAD_PER_CORE, BUSY_BESIDE_OTHERS * usual):
            yield Finding(
                kind="busy",
                ranks=tuple(facts.rank for facts in host.ranks),
                what=f"{host.name}: {load:.1f} processes want each core, on other hosts "
                f"{usual:.1f}",
                advice="see what else runs there (top)",
            )


def versions(checkup: Checkup) -> Iterator[Finding]:
    """Name every version that differs between hosts."""
    known = dict.fromkeys(name for facts in checkup.ranks for name in facts.versions)
    for name in known:
        found: dict[str, list[str]] = {}
        for host in checkup.hosts:
            found.setdefault(host.first.versions.get(name, "none"), []).append(host.name)
        if len(found) > 1:
            where = "; ".join(f"{one} on {words.listed(names)}" for one, names in found.items())
            yield Finding(
                kind="versions",
                ranks=tuple(host.first.rank for host in checkup.hosts),
                what=f"{name} is not the same everywhere ({where})",
                advice="install the same version on all hosts",
            )


def clocks(checkup: Checkup) -> Iterator[Finding]:
    for host in checkup.hosts:
        offset_s = checkup.clock_offsets_s.get(host.first.rank, 0.0)
        if abs(offset_s) > CLOCK_S:
            way = "behind" if offset_s > 0 else "ahead of"
            yield Finding(
                kind="clock",
                ranks=tuple(facts.rank for facts in host.ranks),
                what=f"the clock of {host.name} is {abs(offset_s):,.1f} s {way} rank 0's",
                advice="keep clocks by NTP (timedatectl set-ntp true), or logs of several hosts do "
                "not fit together",
            )


def _pinned(host: Host) -> dict[tuple[int, ...], list[RankFacts]]:
    """Return the ranks that may not use all cores, by the cores that they may use."""
    found: dict[tuple[int, ...], list[RankFacts]] = {}
    for facts in host.ranks:
        if len(facts.cores) < facts.host_cores:
            found.setdefault(facts.cores, []).append(facts)
    return found


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' * (len(cores) > 1)} {words.listed([str(core) for core in cores])}"

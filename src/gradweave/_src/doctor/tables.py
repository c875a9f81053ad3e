"""A checkup as tables of text, for the terminal and for the page alike."""

from collections.abc import Callable, Mapping
from statistics import median

from msgspec import Struct

from gradweave._src.doctor import words
from gradweave._src.doctor.checkup import Checkup, Host, RankFacts
from gradweave._src.doctor.rounds import Pair
from gradweave._src.doctor.slowness import SLOW_TRIP_S

LEVELS = 10
# Of more hosts, a matrix is too wide for a terminal.
MOST_COLUMNS = 12


class Cell(Struct, frozen=True):
    text: str
    level: int | None = None  # from 0, the worst, to LEVELS - 1; None where nothing compares


class Matrix(Struct, frozen=True, kw_only=True):
    """Numbers from each host, a row, to each host, a column; on the diagonal, inside of a host."""

    title: str
    hosts: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    ranges: tuple[tuple[str, str, str], ...]  # of each row: least, median, largest

    @property
    def columns(self) -> dict[str, list[str]]:
        """Return the matrix for a terminal: the whole of it, or what each row comes to."""
        if len(self.hosts) <= MOST_COLUMNS:
            return {
                "from": list(self.hosts),
                **{
                    f"to {name}": [row[place].text for row in self.rows]
                    for place, name in enumerate(self.hosts)
                },
            }
        return {
            "from": list(self.hosts),
            **{
                name: [found[place] for found in self.ranges]
                for place, name in enumerate(("least", "median", "largest"))
            },
        }


def rank_columns(checkup: Checkup) -> dict[str, list[str]]:
    """Return a table of what each rank has, without columns that say nothing of anybody."""
    ranks = checkup.ranks
    columns = {
        "rank": [str(facts.rank) for facts in ranks],
        "host": [facts.host for facts in ranks],
        "interface": [_interface(facts) for facts in ranks],
        "address": [facts.address or "none" for facts in ranks],
        "could also use": [_others(facts) for facts in ranks],
        "cores": [_cores(facts) for facts in ranks],
        "threads": [str(facts.threads) for facts in ranks],
        "load": [f"{facts.load:.1f}" for facts in ranks],
        "clock ms": [_clock(checkup, facts.rank) for facts in ranks],
    }
    return {name: texts for name, texts in columns.items() if any(texts)}


def matrices(checkup: Checkup) -> list[Matrix]:
    """Return the matrices of which anything is known."""
    rates = {(one.sender, one.receiver): one.bytes_per_s for one in checkup.alone}
    trips_s = {(one.sender, one.receiver): one.round_trip_s for one in checkup.alone}
    together = {(one.sender, one.receiver): one.bytes_per_s for one in checkup.together}
    found = []
    if rates:
        title = "Mbit/s from host to host, while nobody else sends"
        found.append(_matrix(checkup, title, rates, words.megabits, _share_of_largest))
    if together:
        title = "Mbit/s from host to host, while all send and receive"
        found.append(_matrix(checkup, title, together, words.megabits, _share_of_largest))
    if trips_s:
        title = "microseconds from host to host and back"
        found.append(_matrix(checkup, title, trips_s, _microseconds, _share_of_least))
    return found


def _matrix(
    checkup: Checkup,
    title: str,
    numbers: Mapping[Pair, float],
    write: Callable[[float], str],
    share: Callable[[float, list[float]], float],
) -> Matrix:
    hosts = checkup.hosts
    ends = {host.first.rank for host in hosts}
    between = [number for pair, number in numbers.items() if set(pair) <= ends]

    def cell(sender: Host, receiver: Host) -> Cell:
        pair = _pair(sender, receiver)
        if pair is None or pair not in numbers:
            return Cell("")
        level = None if sender is receiver else round((LEVELS - 1) * share(numbers[pair], between))
        return Cell(write(numbers[pair]), level)

    def found_from(sender: Host) -> tuple[str, str, str]:
        own = [number for pair, number in numbers.items() if pair[0] == sender.first.rank]
        return (write(min(own)), write(median(own)), write(max(own))) if own else ("", "", "")

    return Matrix(
        title=title,
        hosts=tuple(host.name for host in hosts),
        rows=tuple(tuple(cell(sender, receiver) for receiver in hosts) for sender in hosts),
        ranges=tuple(found_from(sender) for sender in hosts),
    )


def _pair(sender: Host, receiver: Host) -> Pair | None:
    """Return the ranks that speak for two hosts, or the first two of the same host."""
    if sender is not receiver:
        return sender.first.rank, receiver.first.rank
    return (sender.ranks[0].rank, sender.ranks[1].rank) if sender.ranks[1:] else None


def _share_of_largest(number: float, numbers: list[float]) -> float:
    return number / max(numbers)


def _share_of_least(seconds: float, numbers: list[float]) -> float:
    """Compare as verdicts do, which ignore differences of some microseconds."""
    return (min(numbers) + SLOW_TRIP_S) / (seconds + SLOW_TRIP_S)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def _interface(facts: RankFacts) -> str:
    used = facts.used_interface
    if used is None:
        return "none"
    return used.name + (f" ({words.speed(used.bits_per_s)})" if used.bits_per_s else "")


def _others(facts: RankFacts) -> str:
    """List the other interfaces that are up and have an address."""
    return ", ".join(
        f"{one.name} {one.addresses[0].partition('/')[0]}"
        + (f" ({words.speed(one.bits_per_s)})" if one.bits_per_s else "")
        for one in facts.interfaces
        if one.is_up and one.addresses and not one.is_loopback and one.name != facts.interface
    )


def _cores(facts: RankFacts) -> str:
    """Say how many of the host's cores a rank may use, and which if it is a single one."""
    if len(facts.cores) == facts.host_cores:
        return str(facts.host_cores)
    which = f" (core {facts.cores[0]})" if len(facts.cores) == 1 else ""
    return f"{len(facts.cores)} of {facts.host_cores}{which}"


def _clock(checkup: Checkup, rank: int) -> str:
    """Return what to add to the rank's clock to read rank 0's, in milliseconds."""
    offset_s = checkup.clock_offsets_s.get(rank)
    return "" if offset_s is None else f"{offset_s * 1e3:+,.1f}"

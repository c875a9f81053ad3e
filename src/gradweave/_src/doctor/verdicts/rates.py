"""Hosts and links that are slow, alone or while all send."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from gradweave._src.doctor import words
from gradweave._src.doctor.checkup import Checkup, Host
from gradweave._src.doctor.rounds import Pair
from gradweave._src.doctor.slowness import (
    Contention,
    Cut,
    SlowMember,
    SlowPair,
    slow_round_trips,
    what_contends,
    what_is_slow,
)
from gradweave._src.doctor.verdicts.finding import Finding

# Rates that need more of the core time which a process gets on these hosts are the cores', not the
# network's, and are not told from each other. Twenty processes that want two cores leave a tenth of
# a core to each, and links that nothing shapes then seem to differ by a factor of four.
CORE_SHARE = 0.3


def slow(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    hosts = _by_first_rank(checkup)
    slowness = what_is_slow(_rates(checkup, explained), most=_bytes_per_s_of_cores(checkup))
    for member in slowness.members:
        yield _slow_host(hosts[member.member], member)
    for pair in slowness.pairs:
        yield _slow_link(hosts[pair.sender], hosts[pair.receiver], pair)
    if slowness.cut is not None:
        yield _slow_uplink(hosts, slowness.cut)


def _slow_host(host: Host, slow: SlowMember) -> Finding:
    does = "to and from" if slow.sends and slow.receives else "to" if slow.sends else "from"
    card = host.first.used_interface
    says = f"; it says {words.speed(card.bits_per_s)}" if card and card.bits_per_s else ""
    return Finding(
        kind="slow-host",
        ranks=tuple(facts.rank for facts in host.ranks),
        what=f"{host}: {words.rate(slow.found)} {does} every other host, others reach "
        f"{words.megabits(slow.usual)}",
        advice="check its cable, port or driver "
        f"(ethtool {host.first.interface}{says}); every step waits for it",
    )


def _slow_link(sender: Host, receiver: Host, slow: SlowPair) -> Finding:
    arrow = "and" if slow.both_ways else "to"
    usual = "others" if slow.both_ways else "other ways"
    return Finding(
        kind="slow-link",
        ranks=(sender.first.rank, receiver.first.rank),
        what=f"{sender} {arrow} {receiver}: {words.rate(slow.found)}, {usual} "
        f"{words.megabits(slow.usual)}",
        advice="check what is between the two: the switch port, its errors (ip -s link), the route "
        f"(traceroute {receiver.first.address})",
    )


def _slow_uplink(hosts: Mapping[int, Host], cut: Cut) -> Finding:
    return Finding(
        kind="slow-uplink",
        ranks=tuple(sorted(member for group in cut.groups for member in group)),
        what=f"between {_grouped(hosts, cut.groups)}: {words.rate(cut.found)}, inside of them "
        f"{words.megabits(cut.usual)}",
        advice="the link between these groups is slow (a rack's uplink, a switch in between); "
        "train inside of one group, or try a collective that sends little between them "
        "(docs/collectives.md)",
    )


def contention(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    hosts = _by_first_rank(checkup)
    most = _bytes_per_s_of_cores(checkup)
    alone = {pair: min(rate, most) for pair, rate in _rates(checkup, explained).items()}
    together = {(one.sender, one.receiver): one.bytes_per_s for one in checkup.together}
    found = what_contends(alone, together)
    if found is None:
        return
    large = [group for group in found.groups if len(group) > 1]
    if len(large) > 1:
        yield _shared_uplink(hosts, found)
        return
    if len({host.first.machine for host in checkup.hosts}) == 1:
        return  # emulated: hosts share their cores, which explains as much
    slowed = [hosts[one] for group in found.groups if len(group) == 1 for one in group]
    yield Finding(
        kind="slow-together",
        ranks=tuple(host.first.rank for host in slowed),
        what=f"{words.listed([host.name for host in slowed])}: {words.rate(found.together)} while "
        f"all send and receive, {words.megabits(found.alone)} alone",
        advice="full duplex may be off (ethtool), or the switch does not carry all of its ports "
        "at once",
    )


def _shared_uplink(hosts: Mapping[int, Host], found: Contention) -> Finding:
    return Finding(
        kind="shared-uplink",
        ranks=tuple(sorted(member for group in found.groups for member in group)),
        what=f"between {_grouped(hosts, found.groups)}: {words.rate(found.together)} for each "
        f"host when all send at once, {words.megabits(found.alone)} alone",
        advice="they share a link (a rack's uplink): a collective that sends less between them, "
        "such as blueconnect, may be faster (docs/collectives.md)",
    )


def latency(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    hosts = _by_first_rank(checkup)
    slowness = slow_round_trips(
        {
            (one.sender, one.receiver): one.round_trip_s
            for one in checkup.alone
            if {one.sender, one.receiver} <= set(hosts) and one.sender not in explained
        }
    )
    advice = "see what is on the way (traceroute), and whether its card or processor sleeps"
    for member in slowness.members:
        host = hosts[member.member]
        yield Finding(
            kind="latency",
            ranks=tuple(facts.rank for facts in host.ranks),
            what=f"{host}: {words.duration(member.found)} to any host and back, between others "
            f"{words.duration(member.usual)}",
            advice=advice,
        )
    for pair in slowness.pairs:
        yield Finding(
            kind="latency",
            ranks=(pair.sender, pair.receiver),
            what=f"{hosts[pair.sender]} and {hosts[pair.receiver]}: {words.duration(pair.found)} "
            f"there and back, between others {words.duration(pair.usual)}",
            advice=advice,
        )


def _rates(checkup: Checkup, explained: set[int]) -> dict[Pair, float]:
    """Return the rates between hosts that nothing else is known of."""
    return {pair: rate for pair, rate in checkup.rates.items() if not explained & set(pair)}


def _bytes_per_s_of_cores(checkup: Checkup) -> float:
    """Return the rate that cores allow, by the cheapest message seen and the busiest host."""
    s_per_byte = min((one.core_share / one.bytes_per_s for one in checkup.alone), default=0.0)
    if s_per_byte == 0:
        return inf
    available = [min(1.0, host.first.host_cores / (1 + host.first.load)) for host in checkup.hosts]
    return CORE_SHARE * min(available) / s_per_byte


def _by_first_rank(checkup: Checkup) -> dict[int, Host]:
    return {host.first.rank: host for host in checkup.hosts}


def _grouped(hosts: Mapping[int, Host], groups: Sequence[Sequence[int]]) -> str:
    named = [", ".join(hosts[member].name for member in group) for group in groups]
    return words.listed([f"{{{names}}}" for names in named])

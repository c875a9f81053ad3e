"""Ranks that would use an address which others do not reach, or a slower network than others."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_interface, ip_network
from itertools import product
from statistics import median

from gradweave._src.doctor import words
from gradweave._src.doctor.checkup import Checkup, Host, Interface, RankFacts
from gradweave._src.doctor.verdicts.finding import Finding

# An interface is worth changing for another that is so many times as fast.
FASTER_INTERFACE = 4


def loopback(checkup: Checkup) -> Iterator[Finding]:
    if len(checkup.hosts) < 2:  # noqa: PLR2004 on one host loopback is the fastest there is
        return
    for host in checkup.hosts:
        for facts, ranks in _alike(host, lambda one: one.address if one.is_on_loopback else None):
            better = _better_interface(facts, checkup)
            why = {
                "GLOO_SOCKET_IFNAME": "by GLOO_SOCKET_IFNAME",
                "the host name": f"which its host name resolves to, see /etc/hosts of {host.name}",
                "nothing else": "because its host name resolves to no address of its own",
            }[facts.chosen_by]
            yield Finding(
                kind="loopback",
                ranks=ranks,
                what=f"{words.ranks(ranks)} on {host.name} would listen at {facts.address} "
                f"({facts.interface}), {why}, where no other host gets through",
                advice=_export(better, host),
            )


def no_interface(checkup: Checkup) -> Iterator[Finding]:
    for host in checkup.hosts:
        for facts, ranks in _alike(
            host, lambda one: one.settings.get("GLOO_SOCKET_IFNAME") if not one.address else None
        ):
            yield Finding(
                kind="no-interface",
                ranks=ranks,
                what=f"{words.ranks(ranks)} on {host.name}: GLOO_SOCKET_IFNAME="
                f"{facts.settings['GLOO_SOCKET_IFNAME']} names no interface with an address; there "
                f"are {_offered(facts)}",
                advice=_export(_better_interface(facts, checkup), host),
            )


def other_variables(checkup: Checkup) -> Iterator[Finding]:
    """Name variables of NCCL and torch's RPC, which gloo ignores, that fit no interface."""
    for variable, host in product(("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), checkup.hosts):
        for facts, ranks in _alike(host, partial(_missing, variable)):
            yield Finding(
                kind="no-interface",
                ranks=ranks,
                what=f"{words.ranks(ranks)} on {host.name}: {variable}="
                f"{facts.settings[variable]} names no interface; there are {_offered(facts)}",
                advice=f"export {variable} with one of these",
            )


def other_network(checkup: Checkup) -> Iterator[Finding]:
    """Name a host that could use the others' network, and uses another of its own.

    Hosts that have no interface there may well be routed to each other.
    """
    common = _common_network(checkup)
    if common is None:
        return
    on_it = [host for host in checkup.hosts if any(one.network == common for one in host.ranks)]
    for host in checkup.hosts:
        for facts, ranks in _alike(host, lambda one: None if one.is_on_loopback else one.network):
            better = _in_network(facts, common)
            if facts.network == common or better is None:
                continue
            others = "the other host" if len(on_it) == 1 else "others"
            yield Finding(
                kind="other-network",
                ranks=ranks,
                what=f"{words.ranks(ranks)} on {host.name} would use {facts.interface} "
                f"({facts.address}), {others} the network {common}{_rates_there(host, checkup)}",
                advice=_export(better, host)
                + (", or use the same other network on both" if len(on_it) == 1 else ""),
            )


def slower_interface(checkup: Checkup, explained: set[int]) -> Iterator[Finding]:
    """Name an interface that is slower than another, where drivers say how fast they are."""
    found: dict[tuple[str, str, int, int], list[Host]] = {}
    for host in checkup.hosts:
        own = host.first.used_interface
        if host.first.rank in explained or own is None or own.bits_per_s is None:
            continue
        better = max(
            (one for one in _usable(host.first) if one.is_physical and one.bits_per_s),
            key=lambda one: one.bits_per_s or 0,
            default=None,
        )
        if better and (better.bits_per_s or 0) >= FASTER_INTERFACE * own.bits_per_s:
            names = (own.name, better.name, own.bits_per_s, better.bits_per_s or 0)
            found.setdefault(names, []).append(host)
    for (name, better_name, slow, fast), hosts in found.items():
        yield Finding(
            kind="slower-interface",
            ranks=tuple(facts.rank for host in hosts for facts in host.ranks),
            what=f"{words.listed([host.name for host in hosts])} use{'s' * (len(hosts) == 1)} "
            f"{name} ({words.speed(slow)}), though {better_name} ({words.speed(fast)}) is up",
            advice=f"export GLOO_SOCKET_IFNAME={better_name} there, if all hosts reach each other "
            "by it",
        )


def _missing(variable: str, facts: RankFacts) -> str | None:
    """Return the variable's value if it fits no interface: NCCL's are beginnings of names."""
    wanted = facts.settings.get(variable)
    if not wanted or wanted.startswith("^"):
        return None
    beginnings = tuple(part.partition(":")[0] for part in wanted.lstrip("=").split(","))
    return None if any(one.name.startswith(beginnings) for one in facts.interfaces) else wanted


def _better_interface(facts: RankFacts, checkup: Checkup) -> Interface | None:
    """Return one in the others' network, else on the way to the meeting point, else the fastest."""
    common = _common_network(checkup)
    if common is not None and (found := _in_network(facts, common)):
        return found
    usable = _usable(facts)
    return next(
        (one for one in usable if one.name == facts.toward_meeting),
        max(usable, key=lambda one: one.bits_per_s or 0, default=None),
    )


def _usable(facts: RankFacts) -> list[Interface]:
    return [
        one
        for one in facts.interfaces
        if one.is_up and one.addresses and not one.is_loopback and one.name != facts.interface
    ]


def _in_network(facts: RankFacts, network: str) -> Interface | None:
    for one in _usable(facts):
        if any(str(ip_interface(address).network) == network for address in one.addresses):
            return one
    return None


def _common_network(checkup: Checkup) -> str | None:
    """Return the network of most hosts; of two that are as common, the one of the lower rank."""
    found = Counter(
        network
        for host in checkup.hosts
        for network in {one.network for one in host.ranks if not one.is_on_loopback}
        if network is not None and not ip_network(network).is_loopback
    )
    return found.most_common(1)[0][0] if found else None


def _rates_there(host: Host, checkup: Checkup) -> str:
    own = [rate for pair, rate in checkup.rates.items() if host.first.rank in pair]
    others = [rate for pair, rate in checkup.rates.items() if host.first.rank not in pair]
    if not own or not others:
        return ""
    return f", and gets {words.rate(min(own))} there ({words.rate(median(others))} between others)"


def _export(better: Interface | None, host: Host) -> str:
    if better is None:
        return f"give {host.name} an address that other hosts reach"
    address = better.addresses[0].partition("/")[0]
    return f"export GLOO_SOCKET_IFNAME={better.name} on {host.name} ({address})"


def _offered(facts: RankFacts) -> str:
    return ", ".join(
        f"{one.name} ({one.addresses[0].partition('/')[0]})"
        for one in facts.interfaces
        if one.addresses
    )


def _alike(
    host: Host, key: Callable[[RankFacts], str | None]
) -> Iterator[tuple[RankFacts, tuple[int, ...]]]:
    """Yield the ranks of a host that share a key other than None, with the first of them."""
    found: dict[str, list[RankFacts]] = {}
    for facts in host.ranks:
        if (value := key(facts)) is not None:
            found.setdefault(value, []).append(facts)
    for alike in found.values():
        yield alike[0], tuple(facts.rank for facts in alike)

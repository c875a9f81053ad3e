"""What a rank finds where it runs: interfaces, the address gloo will use, cores, load."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from pyroute2 import IPRoute

from gradweave._src.doctor.checkup import ChosenBy, Interface, RankFacts
from gradweave._src.vocabulary import printable

# Each library has its own; gloo looks at the first alone.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SETTINGS = (*INTERFACE_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
LOOPBACK_ADDRESS = "127.0.0.1"
_IFF_UP, _IFF_LOWER_UP = 0x1, 0x10000


class Choice(NamedTuple):
    """The interface and the address that gloo takes, and why."""

    interface: str | None
    address: str | None
    chosen_by: ChosenBy


def rank_facts(
    environment: Mapping[str, str], *, rank: int, threads: int, versions: Mapping[str, str]
) -> RankFacts:
    interfaces = _interfaces()
    host = socket.gethostname()
    choice = gloo_choice(interfaces, environment.get("GLOO_SOCKET_IFNAME", ""), _resolved(host))
    return RankFacts(
        rank=rank,
        host=printable(host),
        machine=_machine(),
        chosen_by=choice.chosen_by,
        interface=choice.interface,
        address=choice.address,
        toward_meeting=_interface_toward(environment.get("MASTER_ADDR", ""), interfaces),
        interfaces=interfaces,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 1,
        threads=threads,
        load=os.getloadavg()[0],
        settings={name: printable(environment[name]) for name in SETTINGS if name in environment},
        versions=dict(versions),
    )


def gloo_choice(interfaces: Sequence[Interface], wanted: str, resolved: Sequence[str]) -> Choice:
    """Choose as torch does: a named interface, else what the host name resolves to, else loopback.

    Of several names, which gloo uses in turn, the first counts; of several addresses, the first.
    """
    if wanted:
        name = wanted.split(",", maxsplit=1)[0]
        own = next((one for one in interfaces if one.name == name), None)
        address = _first_address(own) if own is not None else None
        return Choice(name if own else None, address, "GLOO_SOCKET_IFNAME")
    for address in resolved:
        holder = _holder(address, interfaces)
        if holder is not None:
            return Choice(holder, address, "the host name")
    return Choice(_holder(LOOPBACK_ADDRESS, interfaces), LOOPBACK_ADDRESS, "nothing else")


def _first_address(interface: Interface) -> str | None:
    """Return the interface's first address, IPv4 first, as the kernel lists them and gloo takes."""
    addresses = [text.partition("/")[0] for text in interface.addresses]
    return min(addresses, key=lambda text: ip_address(text).version, default=None)


def _holder(address: str, interfaces: Sequence[Interface]) -> str | None:
    """Return the interface that has this address; loopback has all of 127.0.0.0/8."""
    for one in interfaces:
        if any(text.partition("/")[0] == address for text in one.addresses):
            return one.name
    if address and ip_address(address).is_loopback:
        return next((one.name for one in interfaces if one.is_loopback), None)
    return None


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]).partition("%")[0] for *_, address in found]


def _interface_toward(address: str, interfaces: Sequence[Interface]) -> str | None:
    """Return the interface on the way to the meeting point; no packet is sent to find out."""
    with suppress(OSError, ValueError):
        ((family, *_, target), *_) = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as asking:
            asking.connect(target)
            return _holder(asking.getsockname()[0], interfaces)
    return None


def _interfaces() -> tuple[Interface, ...]:
    with IPRoute() as ipr:
        links = list(ipr.get_links())
        addresses: dict[int, list[str]] = {}
        for message in ipr.get_addr():
            # Of a point-to-point link, IFA_ADDRESS is the other end.
            address = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            addresses.setdefault(message["index"], []).append(f"{address}/{message['prefixlen']}")
    return tuple(_interface(link, addresses.get(link["index"], [])) for link in links)


def _interface(link: Any, addresses: Sequence[str]) -> Interface:
    name = link.get_attr("IFLA_IFNAME")
    card = _card(name, link.get_attr("IFLA_ADDRESS"))
    up = _IFF_UP | _IFF_LOWER_UP
    return Interface(
        name=printable(name),
        addresses=tuple(addresses),
        is_up=link["flags"] & up == up,
        is_physical=_is_physical(card),
        mtu=link.get_attr("IFLA_MTU"),
        bits_per_s=_bits_per_s(card),
    )


def _card(name: str, hardware_address: str | None) -> Path | None:
    """Return the folder of an interface in /sys, if that means this very interface.

    /sys shows the interfaces of the network namespace that it was mounted in, which in a container
    or an emulated cluster may have one of the same name.
    """
    folder = Path("/sys/class/net", name)
    with suppress(OSError):
        if (folder / "address").read_text().strip() == hardware_address:
            return folder
    return None


def _is_physical(card: Path | None) -> bool:
    return card is not None and any((card / part).exists() for part in ("device", "bonding"))


def _bits_per_s(card: Path | None) -> int | None:
    """Return the rate that the driver says; drivers of many virtual machines say -1 or nothing."""
    with suppress(OSError, ValueError):
        if card is not None and (megabits := int((card / "speed").read_text())) > 0:
            return megabits * 10**6
    return None


def _machine() -> str:
    """Return a text that is the same for all processes of one kernel, and for no others."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""

"""Checkups made up for tests, and a store for ranks that are threads."""

from collections.abc import Callable
from datetime import timedelta
from threading import Condition

from gradweave._src.doctor import Checkup
from gradweave._src.doctor.checkup import Flow, Interface, RankFacts, Speed

GIGABIT = 117e6  # bytes per second that TCP gets of a gigabit
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "gradweave": "0.1.0"}


def interface(name: str, address: str, **changes) -> Interface:
    return Interface(name=name, addresses=(address,), is_up=True, **changes)


LOOPBACK = interface("lo", "127.0.0.1/8")


def rank_facts(rank: int, host: int, /, **changes) -> RankFacts:
    address = f"10.77.{host}.{rank + 1}"
    return RankFacts(
        **{
            "rank": rank,
            "host": f"node{host}",
            "machine": f"machine {host}",
            "chosen_by": "GLOO_SOCKET_IFNAME",
            "interface": "eth0",
            "address": address,
            "toward_meeting": "eth0",
            "interfaces": (LOOPBACK, interface("eth0", f"{address}/16")),
            "cores": tuple(range(8)),
            "host_cores": 8,
            "threads": 1,
            "load": 0.5,
            "settings": {"GLOO_SOCKET_IFNAME": "eth0"},
            "versions": VERSIONS,
            **changes,
        }
    )


def checkup(
    hosts: int = 4,
    *,
    ranks_per_host: int = 1,
    alone: Callable[[int, int], float] = lambda _sender, _receiver: GIGABIT,
    together: Callable[[int, int], float] | None = None,
    trip_s: Callable[[int, int], float] = lambda _sender, _receiver: 1e-4,
    core_s_per_byte: float = 0.0,
    changed: dict[int, dict[str, object]] | None = None,
    **changes,
) -> Checkup:
    """Rates and round trips are of hosts, by their numbers; ``changed`` facts of ranks."""
    pairs = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    ranks = [
        rank_facts(rank, rank // ranks_per_host, **(changed or {}).get(rank, {}))
        for rank in range(hosts * ranks_per_host)
    ]
    return Checkup(
        **{
            "meeting_point": "10.77.0.1:29500",
            "world_size": len(ranks),
            "timeout_s": 30.0,
            "ranks": tuple(ranks),
            "alone": tuple(
                Speed(
                    sender=a * ranks_per_host,
                    receiver=b * ranks_per_host,
                    round_trip_s=trip_s(a, b),
                    bytes_per_s=alone(a, b),
                    core_share=core_s_per_byte * alone(a, b),
                )
                for a, b in pairs
            ),
            "together": tuple(
                Flow(
                    sender=a * ranks_per_host,
                    receiver=b * ranks_per_host,
                    bytes_per_s=(together or alone)(a, b),
                )
                for a, b in pairs
            ),
            **changes,
        }
    )


class ThreadStore:
    """What Meeting needs of torch's stores, for ranks that are threads."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._texts[key] = value
            self._changed.notify_all()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._changed:
            return [self._texts[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._texts for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(key in self._texts for key in keys), timeout.total_seconds()
            ):
                raise RuntimeError("wait timeout")

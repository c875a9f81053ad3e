"""What is wrong, and what to do about it: decided from a checkup's values alone.

One line for each cause. What follows from a cause that has been named is not named again: a host
that uses the wrong interface is not called slow as well.
"""

from gradweave._src.doctor.checkup import Checkup
from gradweave._src.doctor.verdicts import hosts, interfaces, presence, rates
from gradweave._src.doctor.verdicts.finding import Finding

__all__ = ["Finding", "verdicts"]


def verdicts(checkup: Checkup) -> tuple[Finding, ...]:
    """Name what keeps training from starting, then what slows it down, then what may confuse."""
    choices = [
        *interfaces.loopback(checkup),
        *interfaces.no_interface(checkup),
        *interfaces.other_network(checkup),
    ]
    explained = {rank for finding in choices for rank in finding.ranks}
    pinned = [*hosts.shared_cores(checkup), *hosts.one_core(checkup)]
    return (
        *presence.absent(checkup),
        *presence.lost(checkup),
        *choices,
        *presence.unreached(checkup, explained | set(checkup.lost)),
        *presence.gloo(checkup),
        *interfaces.other_variables(checkup),
        *interfaces.slower_interface(checkup, explained),
        *rates.slow(checkup, explained),
        *rates.contention(checkup, explained),
        *rates.latency(checkup, explained),
        *pinned,
        *hosts.threads(checkup, {rank for finding in pinned for rank in finding.ranks}),
        *hosts.busy(checkup),
        *hosts.versions(checkup),
        *hosts.clocks(checkup),
    )

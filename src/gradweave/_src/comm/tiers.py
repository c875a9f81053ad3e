"""BlueConnect, where each tier's reduce-scatter and all-gather are ours or the backend's.

Each tier has a process group of its own. On the way in, a rank reduce-scatters its part of the
message within its group and goes on with the share it owns; on the way out it all-gathers back.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from gradweave._src.clocks import clock_for, taken_s
from gradweave._src.collectives import TIERS
from gradweave._src.collectives.blueconnect import groups
from gradweave._src.collectives.schedule import block_edges
from gradweave._src.collectives.topology import Topology
from gradweave._src.comm.groups import MakeGroup
from gradweave._src.comm.small_messages import largest
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import Operation

TUNING_REPEATS = 3


class Runner(Protocol):
    """The part of a communicator that a tier needs."""

    group: dist.ProcessGroup

    def run(self, operation: Operation, message: torch.Tensor, *, collective: str) -> None: ...


def tier_groups(topology: Topology, rank: int, make_group: MakeGroup) -> list[dist.ProcessGroup]:
    """Return the group of each tier that this rank is in, innermost first."""
    own = []
    for tier in range(len(topology.factors)):
        members, _ = groups(topology.factors, tier)
        for places in members.tolist():
            ranks = [topology.order[place] for place in places]
            if ranks != sorted(ranks):
                raise RequestError(
                    f"ranks {ranks} would form a group of tier {tier}, but groups count upwards; "
                    "number the ranks host by host, as torchrun does"
                )
            group = make_group(ranks)
            if rank in ranks:
                assert group is not None
                own.append(group)
    return own


def tiered_all_reduce(
    tiers: Sequence[Runner], message: torch.Tensor, collectives: Sequence[str]
) -> None:
    """Sum over all tiers, tier i by the collective named for it."""
    parts = _parts(tiers, message)
    for tier, part, name in zip(tiers, parts, collectives, strict=True):
        tier.run("reduce-scatter", part, collective=name)
    for tier, part, name in reversed(list(zip(tiers, parts, collectives, strict=True))):
        tier.run("all-gather", part, collective=name)


def _parts(tiers: Sequence[Runner], message: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's part of the message in each tier: a block of that in the tier before."""
    parts = [message]
    for tier in tiers[:-1]:
        edges = block_edges(parts[-1].numel(), tier.group.size())
        rank = tier.group.rank()
        parts.append(parts[-1][edges[rank] : edges[rank + 1]])
    return parts


def fastest_collectives(
    tiers: Sequence[Runner], message: torch.Tensor, world: dist.ProcessGroup
) -> tuple[str, ...]:
    """Return each tier's fastest collective, as measured; all ranks come to the same choice."""
    candidates = ["native", *TIERS]
    chosen = []
    for tier, part in zip(tiers, _parts(tiers, message), strict=True):
        trial = torch.zeros_like(part)
        times_s = [_best_s(tier, trial, name) for name in candidates]
        slowest_s = largest(world, times_s)
        chosen.append(min(zip(slowest_s, candidates, strict=True))[1])
    return tuple(chosen)


def _best_s(tier: Runner, trial: torch.Tensor, name: str) -> float:
    """Return the fastest of several tries, the first of which also warms up."""

    def run() -> None:
        tier.run("reduce-scatter", trial, collective=name)
        tier.run("all-gather", trial, collective=name)

    clock = clock_for(trial.device)
    return min(taken_s(clock, run) for _ in range(TUNING_REPEATS))

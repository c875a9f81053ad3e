"""Process groups of our own beside a user's.

Two threads on one group would mix up their messages, and a user's group is the user's. Groups that
torch lists stay, with their threads and connections, until all ranks destroy them at the same point
of the script, for torch names new ones by how many there are. Nobody knows when a wrapper is
dropped, so those of gloo are not listed, and go with the last reference.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gradweave._src.comm.small_messages import largest
from gradweave._src.comm.stores import store_for
from gradweave._src.errors import RequestError
from gradweave._src.torch_internals import (
    backend_for,
    devices_carried,
    group_timeout,
    is_listed,
    unlisted_gloo_group,
)

# Makes a group of some ranks of another; None on ranks that are not among them.
MakeGroup = Callable[[list[int]], dist.ProcessGroup | None]

# How many groups of the same ranks a group has had, and of each part of them. Those who are in one
# make it equally often, so a number is a name.
_had: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
# What tells a group, where its ranks have agreed on that, from one that has had the same name.
_tokens: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
# So long is a whole number that is told as a float64.
EXACT_BITS = 52


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RequestError("there is no process group; call init_process_group first")
    return group


def same_ranks(group: dist.ProcessGroup, *, backend: str | None = None) -> dist.ProcessGroup:
    """Make another group of the same ranks; all of them do so together."""
    everyone = list(range(group.size()))
    if backend != "gloo" and not _is_gloo(group):
        return _listed(group, everyone, backend)
    had = _had.setdefault(group, Counter())
    had["same ranks"] += 1
    return _unlisted(group, f"gradweave group {had['same ranks']}", everyone)


def subgroups_of(group: dist.ProcessGroup) -> MakeGroup:
    """Return a function that makes groups of some of the ranks; only those wait for each other."""

    def make(ranks: list[int], /) -> dist.ProcessGroup | None:
        if group.rank() not in ranks:
            return None
        if is_listed(group):
            return _listed(group, ranks, backend=None)
        had = _had.setdefault(group, Counter())
        had[str(ranks)] += 1  # ranks that have met once would find their old addresses
        return _unlisted(group, f"gradweave part {ranks}, {had[str(ranks)]}", ranks)

    return make


def common_place(group: dist.ProcessGroup, store: Store | None) -> Store | None:
    """Return a place in the group's store that nobody has used, the same on all ranks.

    Keys of a job that was restarted, or of a group before this one, may still be in the store. All
    ranks call this together, each with its connection. Return None on all of them where one has
    none.
    """
    chosen = secrets.randbits(EXACT_BITS) if group.rank() == 0 else 0
    agreed, is_missing = largest(group, [float(chosen), float(store is None)])
    token = f"{int(agreed):x}"
    _tokens.setdefault(group, token)
    return None if is_missing or store is None else PrefixStore(f"gradweave/{token}", store)


def name_in_store(group: dist.ProcessGroup, name: str) -> str:
    """Return a name in the group's store which no group before this one has used.

    That is so from the first ``common_place`` of the group on. Before that it is the name alone.
    """
    return f"{name} {_tokens.get(group, '')}"


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return {backend_for(group, torch.device(kind)) for kind in devices_carried(group)} == {"gloo"}


def _listed(group: dist.ProcessGroup, ranks: list[int], backend: str | None) -> dist.ProcessGroup:
    of_the_job = dist.get_process_group_ranks(group)
    made = dist.new_group(
        [of_the_job[rank] for rank in ranks],
        timeout=group_timeout(group),
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _unlisted(group: dist.ProcessGroup, name: str, ranks: list[int]) -> dist.ProcessGroup:
    return unlisted_gloo_group(
        store_for(group, name_in_store(group, name)),
        rank=ranks.index(group.rank()),
        ranks=len(ranks),
        timeout=group_timeout(group),
    )

"""Process groups of our own beside a user's.

Two threads on one group would mix up their messages, and a user's group belongs to the user. Groups
that torch lists stay, with their threads and connections, until all ranks destroy them at the same
point of the script, for torch names new groups by how many it lists. Nobody knows when a wrapper is
dropped, so ours are not listed if they are gloo's, and end with the last reference.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gradweave._src.comm.small_messages import largest
from gradweave._src.comm.stores import cloned_store, store_for
from gradweave._src.errors import RequestError
from gradweave._src.in_time import in_time
from gradweave._src.torch_internals import (
    backend_for,
    devices_carried,
    group_timeout,
    is_listed,
    unlisted_gloo_group,
)

# Makes a group of some ranks of another; None on ranks that are not among them.
MakeGroup = Callable[[list[int]], dist.ProcessGroup | None]

# How many groups of the same ranks have been made of a group, and how many of each part of it. All
# ranks of such a group make it equally often, so its number can be its name.
_had: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
# What tells a group from an earlier one of the same name, once its ranks have agreed on it.
_tokens: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
# The same where ranks have not agreed on one: rank 0's own, and None on others, which find it here.
_left_tokens: WeakKeyDictionary[dist.ProcessGroup, str | None] = WeakKeyDictionary()
LEFT_AT = "gradweave/token"
# How long rank 0 waits for the store, which may be gone, to leave its token there.
LEFT_WITHIN_S = 5.0
# Bits that a float64 holds exactly.
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
        had[str(ranks)] += 1  # under a used name they would find the addresses of the last time
        return _unlisted(group, f"gradweave part {ranks}, {had[str(ranks)]}", ranks)

    return make


def common_place(group: dist.ProcessGroup, store: Store | None) -> Store | None:
    """Return a place in the group's store that nobody has used, the same on all ranks.

    Keys of a job that was restarted, or of an earlier group, may still be in the store. All ranks
    call this together, each with its connection. Return None on all of them where one has no
    connection.
    """
    chosen = secrets.randbits(EXACT_BITS) if group.rank() == 0 else 0
    agreed, is_missing = largest(group, [float(chosen), float(store is None)])
    token = f"{int(agreed):x}"
    _tokens.setdefault(group, token)
    return None if is_missing or store is None else PrefixStore(f"gradweave/{token}", store)


def name_in_store(group: dist.ProcessGroup, name: str) -> str:
    """Return a name in the group's store that no earlier group has used.

    Before the group's first ``common_place`` it is the name alone, which one may have used.
    """
    return f"{name} {_tokens.get(group, '')}"


def leave_token(group: dist.ProcessGroup) -> None:
    """Have ranks of this group meet no rank of an earlier one, without sending a message.

    Rank 0 leaves a token in the store, and others look for it there when they meet. (Whoever asks
    before rank 0 has left it may find that of an earlier group, where nobody comes; on the CPU that
    cannot be once a step was taken together.) If the store does not answer in time, rank 0 leaves
    it only when it meets the others.
    """
    if group.size() == 1 or group in _left_tokens:
        return
    if group.rank():
        _left_tokens[group] = None
        return
    _left_tokens[group] = token = f"{secrets.randbits(EXACT_BITS):x}"

    def leave() -> None:
        store = cloned_store(group)
        if store is not None:
            _leave(store, token)

    with suppress(RuntimeError, OSError):
        in_time(leave, limit_s=LEFT_WITHIN_S)


def _leave(store: Store, token: str) -> None:
    store.set(LEFT_AT, token)
    store.check([LEFT_AT])  # answered in order: it is there before this rank goes on


def meeting_name(group: dist.ProcessGroup, store: Store, name: str) -> str | None:
    """Return a name under which ranks meet in the group's store; no earlier group has used it.

    It is None while rank 0 has not left its token yet.
    """
    if group in _tokens or group not in _left_tokens:
        return name_in_store(group, name)
    token = _left_tokens[group]
    if token is not None:
        _leave(store, token)  # again, for it may have failed
    elif store.check([LEFT_AT]):
        token = store.get(LEFT_AT).decode()
    return None if token is None else f"{name} {token}"


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

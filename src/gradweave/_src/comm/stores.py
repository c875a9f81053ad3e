"""The store of a group, where its ranks meet, by connections of our own.

A connection that was lost, or that somebody waits in, is of no use any more: torch's client does
not connect again, and does one thing at a time. So whoever needs the store for something gets a new
connection, which ends with the last reference. A rank holds one for each place where it meets
others for long, as where plans are told, and each group of ours.
"""

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


def cloned_store(group: dist.ProcessGroup) -> Store | None:
    """Return the group's store by a new connection, for the user's may wait for something.

    Return None where the group has no store that others can use beside it.

    Raises:
        torch.distributed.DistError: where the store cannot be reached, perhaps from this rank only.
    """
    try:
        return group.get_group_store().clone()  # type: ignore[attr-defined,no-any-return]
    except dist.DistError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def store_for(group: dist.ProcessGroup, name: str) -> Store:
    """Return where ranks of another group meet; by the user's own connection where there must."""
    try:
        own = cloned_store(group)
    except dist.DistError:
        own = None
    return PrefixStore(name, own or group.get_group_store())

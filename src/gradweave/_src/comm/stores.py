"""The store of a group, where its ranks meet, by a connection of our own.

There is one for each group and process, for all of them end at one host.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_cloned: WeakKeyDictionary[dist.ProcessGroup, Store] = WeakKeyDictionary()


def cloned_store(group: dist.ProcessGroup) -> Store | None:
    """Return the group's store by our own connection, for the user's may wait for something.

    Return None where the group has no store that others can use beside it.

    Raises:
        torch.distributed.DistError: where the store cannot be reached, perhaps from this rank only.
    """
    if (known := _cloned.get(group)) is not None:
        return known
    try:
        own: Store = group.get_group_store().clone()  # type: ignore[attr-defined]
    except dist.DistError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return _cloned.setdefault(group, own)


def store_for(group: dist.ProcessGroup, name: str) -> Store:
    """Return where ranks of another group meet; by the user's own connection where there must."""
    try:
        own = cloned_store(group)
    except dist.DistError:
        own = None
    return PrefixStore(name, own or group.get_group_store())

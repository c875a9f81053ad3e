"""Process groups of our own beside a user's."""

from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gradweave.comm.agree import group_device
from gradweave.comm.communicator import Communicator, same_ranks
from gradweave.torch_internals import group_timeout, unlisted_gloo_group

# How many twins a group has had. All ranks make them in the same order, so a number is a name.
_had: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class TwinGroups:
    """Groups of the same ranks as another one, for whoever must not mix messages with its users.

    Groups that torch lists stay, with their threads and connections, until all ranks destroy them
    at the same point of the script: torch names new ones by how many there are. Nobody knows when a
    wrapper is dropped, so those of gloo are not listed, and go with the last reference.
    """

    def __init__(self, group: dist.ProcessGroup, *, backend: str | None = None) -> None:
        self._group, self._backend = group, backend or group.name()

    def make(self) -> dist.ProcessGroup:
        """Make one more; all ranks of the group do so together."""
        group = self._group
        if self._backend != "gloo":
            return same_ranks(group, backend=self._backend)
        had = _had.setdefault(group, Counter())
        had["twins"] += 1
        return _part(group, f"gradweave twin {had['twins']}", list(range(group.size())))

    def communicator(self) -> Communicator:
        """Make one more, and what runs collectives on it, also in tiers."""
        twin = self.make()
        if twin.name() != "gloo":
            return Communicator(twin)

        def part(ranks: list[int], /) -> dist.ProcessGroup | None:
            is_in = twin.rank() in ranks
            return _part(twin, f"gradweave part {ranks}", ranks) if is_in else None

        return Communicator(twin, make_group=part)


def _part(group: dist.ProcessGroup, name: str, ranks: list[int]) -> dist.ProcessGroup:
    return unlisted_gloo_group(
        PrefixStore(name, group.get_group_store()),
        rank=ranks.index(group.rank()),
        ranks=len(ranks),
        timeout=group_timeout(group, group_device(group)),
    )

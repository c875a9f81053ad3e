"""Ranks check that they make the same call before a kind of message is first sent."""

import torch.distributed as dist

from gradweave._src.comm.channel import Call
from gradweave._src.comm.small_messages import all_say_the_same, gather_text
from gradweave._src.errors import CollectiveError


class SameCalls:
    """The kinds of messages of which all ranks of a group are known to mean the same.

    Ranks that make different calls later are not told so, but receive nothing from each other:
    their tags differ.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._kinds: set[str] = set()

    def check(self, call: Call, *, circumstances: str = "") -> None:
        """Raise on all ranks unless they mean the same call; each kind is checked once.

        ``circumstances`` must be the same, too; they are not part of the kind.
        """
        if call.kind in self._kinds:
            return
        said = call.kind + circumstances
        try:
            if not all_say_the_same(self._group, said):
                raise self._disagreement(gather_text(self._group, said))
        except RuntimeError as error:
            raise call.failed("comparing notes before the first of its kind", error) from error
        self._kinds.add(call.kind)

    def _disagreement(self, everyone: list[str]) -> CollectiveError:
        rank, text = next((r, text) for r, text in enumerate(everyone) if text != everyone[0])
        return CollectiveError(
            f"ranks disagree on what to do: rank 0 has {everyone[0]}; rank {rank} has {text}; "
            "call it alike, with the same topology and link, on every rank"
        )

"""Meetings of all ranks in a store: how one ends is decided once, and holds for whoever has come.

Nothing is sent on a group, where a rank that does not come would leave others waiting in a message.
"""

from collections.abc import Callable, Sequence
from time import monotonic, sleep

from torch.distributed import Store  # type: ignore[attr-defined]

# How a meeting ends to which all ranks have come; any other ending is a complaint.
ALL_ARE_HERE = "all are here"
COME, OVER, LEFT = "come", "over", "left"
# The first pause between two looks, the longest, and how fast pauses grow: others come within
# milliseconds as a rule, and of many ranks all ask the host of one store.
FIRST_PAUSE_S, LONGEST_PAUSE_S, GROWTH = 0.0005, 0.1, 1.2
MOST_RANKS_NAMED = 8


class Meeting:
    """A meeting of so many ranks in a place of a store that nobody else uses.

    It is over when all have come, or when one of them ends it, whichever is first. Each rank leaves
    once, also one that did not come; the last takes away the keys.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._ranks = store, ranks

    def come(self) -> None:
        """Count this rank; the last one ends the meeting."""
        if self._store.add(COME, 1) == self._ranks:
            self.end(ALL_ARE_HERE)

    def come_so_far(self) -> int:
        return int(self._store.add(COME, 0))

    def ending(self) -> str | None:
        """Return how it has ended; None while it goes on."""
        return self._store.get(OVER).decode() if self._store.check([OVER]) else None

    def end(self, proposal: str) -> str:
        """End the meeting like this, unless another rank was faster; return how it has ended."""
        return self._store.compare_set(OVER, "", proposal).decode()

    def wait(self, why_end: Callable[[float], str | None]) -> str:
        """Wait until the meeting is over, and return how it has ended.

        ``why_end`` is asked now and then, with the seconds waited so far; what it returns, if it
        returns anything, ends the meeting.
        """
        began_s, pause_s = monotonic(), FIRST_PAUSE_S
        while (ending := self.ending()) is None:
            why = why_end(monotonic() - began_s)
            if why is not None:
                return self.end(why)
            sleep(pause_s)
            pause_s = min(pause_s * GROWTH, LONGEST_PAUSE_S)
        return ending

    def leave(self, *other_keys: str) -> None:
        """Say that this rank asks for nothing more; the last deletes these keys, too."""
        if self._store.add(LEFT, 1) == self._ranks:
            for key in (COME, OVER, LEFT, *other_keys):
                self._store.delete_key(key)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return such texts as ``rank 3``, or ``ranks 0, 1``, of which many are not named."""
    named = ", ".join(map(str, ranks[:MOST_RANKS_NAMED]))
    more = len(ranks) - MOST_RANKS_NAMED
    if more > 0:
        named += f" and {more} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"

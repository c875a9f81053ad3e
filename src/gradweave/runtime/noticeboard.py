"""What ranks tell each other in the background, through the store of their process group.

Nobody waits here, and no collective runs: torch's contract is that all ranks run the same
synchronised backward passes, and nothing more. Rank 0 announces what holds from pass n + 1 on
before its own pass n, and since nobody can end pass n without rank 0, everybody finds the
announcement when it is needed.
"""

import secrets
from threading import Event
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gradweave.comm.small_messages import broadcast_text, group_device

POLLED_EVERY_S = 0.001
# A rank that wants to leave asks rank 0 first; one that gets no answer in this time leaves anyway.
LEFT_WITHIN_S = 1.0
# Added to a counter by whoever wants everybody to stop; no counter gets there by itself.
STOP = 1 << 40


class Noticeboard:
    """Texts of all ranks by topic, and announcements of rank 0 by the pass they hold from.

    Make it on every rank: rank 0 chooses where in the store it is, for keys of a job that was
    restarted may still be there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        place = broadcast_text(group, secrets.token_hex(8), device=group_device(group))
        # A connection of its own: the user's may be waiting for something.
        store: Store = group.get_group_store().clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"gradweave/{place}", store)

    def say(self, topic: str, text: str) -> None:
        """What this rank has to say; once for each topic."""
        self._store.set(f"{topic}/{self.rank}", text)

    def everyone(self, topic: str) -> list[str] | None:
        """What all ranks have said; None while some have not."""
        keys = [f"{topic}/{rank}" for rank in range(self.ranks)]
        if not self._store.check(keys):
            return None
        return [value.decode() for value in self._store.multi_get(keys)]

    def announce(self, from_pass: int, text: str) -> None:
        """Rank 0, before its pass ``from_pass`` - 1."""
        key = f"from pass {from_pass}"
        self._store.set(key, text)
        self._store.check([key])  # answered in order: the store has it before anybody can ask

    def announced(self, from_pass: int) -> str | None:
        """Every rank, when ``from_pass`` - 1 passes are over."""
        key = f"from pass {from_pass}"
        if not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def turns(self, name: str) -> "Turns":
        """Make it on every rank, with the same name."""
        return Turns(self._store, name, rank=self.rank, ranks=self.ranks)


class Ended(Exception):
    """Nobody is to take turns any more."""


class Turns:
    """Lets a thread of every rank go on, or none of them: a message has two ends.

    Whoever is waited for may have other things to do, or be gone, so waiting can be ended at any
    time, on any rank, and ends on all of them. Rank 0 decides.
    """

    def __init__(self, store: Store, name: str, *, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._arrived_key, self._go_key = f"{name}, arrived", f"{name}, go"
        self._number = 0
        self._ending = Event()
        for key in (self._arrived_key, self._go_key):
            store.add(key, 0)

    def end(self) -> None:
        """From any thread: the present turn, if it has not begun, and all later ones raise."""
        self._ending.set()

    @property
    def has_ended(self) -> bool:
        return self._ending.is_set()

    def take(self) -> None:
        """Return on all ranks, or raise Ended on all of them."""
        self._number += 1
        self._store.add(self._arrived_key, STOP if self.has_ended else 1)
        if self._rank == 0:
            self._decide()
        else:
            self._follow()

    def _decide(self) -> None:
        goes = self._reaches(self._arrived_key, self._number * self._ranks, leaves_after_s=0.0)
        self._store.add(self._go_key, 1 if goes else STOP)
        if not goes:
            raise Ended

    def _follow(self) -> None:
        if not self.has_ended:
            if self._reaches(self._go_key, self._number, leaves_after_s=0.0):
                return
            self._store.add(self._arrived_key, STOP)
        # A turn that has begun meanwhile is taken all the same: others are in it.
        if not self._reaches(self._go_key, self._number, leaves_after_s=LEFT_WITHIN_S):
            raise Ended

    def _reaches(self, key: str, least: int, *, leaves_after_s: float) -> bool:
        """Whether a counter gets so far before somebody stops it, or this rank ends so long ago."""
        ended_s: float | None = None
        while True:
            is_stopped, counted = divmod(int(self._store.get(key)), STOP)
            if counted >= least or is_stopped:
                return counted >= least
            if self.has_ended:
                ended_s = ended_s or monotonic()
                if monotonic() - ended_s >= leaves_after_s:
                    return False
            sleep(POLLED_EVERY_S)

"""What ranks tell each other in the background, through the store of their process group.

Nobody waits here, and no collective runs: torch's contract is that all ranks run the same
synchronised backward passes, and nothing more. Rank 0 announces what holds after a pass before its
own part of that pass, and since nobody can end the pass without rank 0, everybody finds the
announcement when it is needed.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from math import ceil
from threading import Event
from time import monotonic, sleep
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from gradweave._src.in_time import in_time
from gradweave._src.torch_internals import timeout_s

Answer = TypeVar("Answer")

# The first pause between two looks at a counter, the longest, and how fast pauses grow.
POLLED_EVERY_S, POLLED_LATER_EVERY_S, PATIENCE = 0.001, 0.02, 1.1
# Rank 0 reads the reports of so many ranks at most, however large the world is.
MOST_REPORTERS = 256
# A rank that wants to stop asks rank 0 first, and stops anyway after so long without an answer.
LEFT_WITHIN_S = 1.0
# What a rank adds to a counter to stop all ranks; no counter gets there by counting.
STOP = 1 << 40


class Noticeboard:
    """Texts of all ranks by topic, and announcements of rank 0 by the pass they hold after.

    ``store`` is a place that nobody else uses, the same on all ranks. One that does not answer
    within the group's time-out raises RuntimeError: torch's own calls would wait for ever where
    this rank is cut off.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self._store = store
        self._announced_last: str | None = None
        self._reporters = range(0, self.ranks, ceil(self.ranks / MOST_REPORTERS))
        self._topics: set[str] = set()  # on which this rank has been counted
        self._answered_within_s = timeout_s(group)
        self._is_silent = False

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered once; nothing is sent there any more."""
        return self._is_silent

    def say(self, topic: str, text: str) -> None:
        """Say something on a topic; only what was said last stays."""
        self._asked(lambda: self._put(topic, text))

    def everyone(self, topic: str) -> list[str] | None:
        """Return what all ranks have said on a topic; None while some have not."""
        said = self._read(topic, list(range(self.ranks)))
        return None if said is None else list(said.values())

    def report(self, topic: str, text: str, *, must_be_heard: bool) -> None:
        """Report what this rank has found on a topic.

        In a large world rank 0 reads only some ranks, and any one that says ``must_be_heard``.
        """

        def write() -> None:
            if must_be_heard:
                self._store.set(f"{topic}/must be heard", str(self.rank))
            self._put(topic, text if must_be_heard or self.rank in self._reporters else None)

        self._asked(write)

    def reports(self, topic: str) -> dict[int, str] | None:
        """Return what ranks have reported; None while any rank has not come so far."""
        return self._read(topic, self._reporters, and_others=True)

    def forget(self, topic: str) -> None:
        """Delete a topic; every rank does so when rank 0 has read what all have said."""

        def delete() -> None:
            self._store.delete_key(f"{topic}/{self.rank}")
            if self.rank == 0:
                for name in ("ranks", "must be heard"):
                    self._store.delete_key(f"{topic}/{name}")

        self._asked(delete)
        self._topics.discard(topic)

    def _put(self, topic: str, text: str | None) -> None:
        if text is not None:
            self._store.set(f"{topic}/{self.rank}", text)
        if topic not in self._topics:
            # Rank 0 asks for one number until all are there, not for a key of each of them.
            self._store.add(f"{topic}/ranks", 1)
            self._topics.add(topic)

    def _read(
        self, topic: str, ranks: Sequence[int], *, and_others: bool = False
    ) -> dict[int, str] | None:
        counted, others = f"{topic}/ranks", f"{topic}/must be heard"

        def read() -> dict[int, str] | None:
            if not self._store.check([counted]) or int(self._store.get(counted)) < self.ranks:
                return None
            asked = set(ranks)
            if and_others and self._store.check([others]):
                asked.add(int(self._store.get(others)))
            in_order = sorted(asked)
            values = self._store.multi_get([f"{topic}/{rank}" for rank in in_order])
            return {rank: value.decode() for rank, value in zip(in_order, values, strict=True)}

        return self._asked(read)

    def announce(self, after_pass: int, text: str) -> None:
        """Announce what holds after a pass; rank 0 does so before its own part of that pass.

        All have heard what was announced before, which is deleted.
        """
        last, key = self._announced_last, f"after pass {after_pass}"

        def write() -> None:
            if last is not None:
                self._store.delete_key(last)
            self._store.set(key, text)
            self._store.check([key])  # answered in order: the store has it before anybody can ask

        self._asked(write)
        self._announced_last = key

    def announced(self, after_pass: int) -> str | None:
        """Return what was announced for when so many passes are over; None where nothing was."""
        key = f"after pass {after_pass}"

        def read() -> str | None:
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self._asked(read)

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        if self._is_silent:
            raise RuntimeError("the store has not answered before")
        try:
            return in_time(call, limit_s=self._answered_within_s)
        except TimeoutError as error:
            self._is_silent = True
            raise RuntimeError(str(error)) from None

    def turns(self, name: str) -> "Turns":
        """Return the turns of this name, which every rank must make, or refuse."""
        return self._asked(lambda: Turns(self._store, name, rank=self.rank, ranks=self.ranks))

    def refuse_turns(self, name: str) -> None:
        """Refuse the turns of this name for this rank, and so for all ranks."""
        turns = self.turns(name)
        self._asked(turns.refuse)


class Ended(Exception):
    """Raised where nobody is to take turns any more."""


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
        """End all turns that have not begun: they raise. Any thread may call this."""
        self._ending.set()

    @property
    def has_ended(self) -> bool:
        return self._ending.is_set()

    def refuse(self) -> None:
        """Refuse all turns for this rank, and so for all ranks; it has no thread to take them."""
        self._ending.set()
        for key in (self._arrived_key, self._go_key) if self._rank == 0 else (self._arrived_key,):
            self._store.add(key, STOP)

    def take(self) -> None:
        """Return on all ranks, or raise Ended on all of them."""
        self._number += 1
        self._store.add(self._arrived_key, STOP if self.has_ended else 1)
        if self._rank == 0:
            self._decide()
        else:
            self._follow()

    def _decide(self) -> None:
        reached = self._reached(self._arrived_key, self._number * self._ranks, leaves_after_s=0.0)
        goes = reached is Reached.SO_FAR  # who has asked to stop may have left by now
        self._store.add(self._go_key, 1 if goes else STOP)
        if not goes:
            raise Ended

    def _follow(self) -> None:
        so_far = (Reached.SO_FAR, Reached.SO_FAR_AND_STOPPED)
        if not self.has_ended:
            if self._reached(self._go_key, self._number, leaves_after_s=0.0) in so_far:
                return
            self._store.add(self._arrived_key, STOP)
        # If the turn has begun meanwhile, this rank takes it, because others are in it.
        if self._reached(self._go_key, self._number, leaves_after_s=LEFT_WITHIN_S) not in so_far:
            raise Ended

    def _reached(self, key: str, least: int, *, leaves_after_s: float) -> "Reached":
        """Wait until the counter reaches ``least``, or another rank stops it.

        It also ends when ``leaves_after_s`` have passed since this rank ended.
        """
        ended_s: float | None = None
        pause_s = POLLED_EVERY_S
        while True:
            is_stopped, counted = divmod(int(self._store.get(key)), STOP)
            if counted >= least:
                return Reached.SO_FAR_AND_STOPPED if is_stopped else Reached.SO_FAR
            if is_stopped:
                return Reached.STOPPED
            if self.has_ended:
                ended_s = ended_s or monotonic()
                if monotonic() - ended_s >= leaves_after_s:
                    return Reached.STOPPED
            sleep(pause_s)
            pause_s = min(pause_s * PATIENCE, POLLED_LATER_EVERY_S)


class Reached(Enum):
    """How far a counter has got when waiting for it is over."""

    SO_FAR = "as far as it should"
    SO_FAR_AND_STOPPED = "as far as it should; it goes no further"
    STOPPED = "not so far"

"""Calls that all ranks make together: ranks meet through the store before anything is sent.

A rank that is alone in such a call would send what nobody waits for: it would end in an abort of
gloo's, perhaps in the middle of another rank's training, or wait silently.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from time import monotonic, sleep
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from gradweave._src.comm.groups import name_in_store
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.in_time import in_time
from gradweave._src.runtime.same_wrapping import (
    ASKED_EVERY_S,
    ASKED_LATER_EVERY_S,
    PATIENCE,
    named_ranks,
)
from gradweave._src.torch_internals import group_timeout, is_fake

logger = logging.getLogger(__name__)

# Others may evaluate a model or write it first, so whoever waits says so long before it gives up.
TOLD_AFTER_S = 10.0
# A rank waits for so much of the group's time-out: others that go on training wait for us
# meanwhile, and are not to be the first that fail.
OF_TIMEOUT = 0.8
# For the store to answer, beside waiting for others.
ANSWERED_WITHIN_S = 5.0
# Keys of a meeting, beside one for each rank that has come.
COME, TOLD, OVER, LEFT = "come", "told", "over", "left"
ALL_ARE_HERE = "all are here"
NEW_LINE = "\n"


@dataclass
class Caller:
    """A rank that makes a call which is for all ranks, and makes it again later on.

    Each rank comes to each meeting once, if only to see that it was given up, so a number is a
    name: of how many meetings this rank knows that they are over.
    """

    call: str
    rank: int
    ranks: int
    number: int = 0
    # A call that was interrupted has to leave its meeting before the next one comes to any.
    _one_at_a_time: Lock = field(default_factory=Lock)

    def meet(self, store: Store, limit_s: float, *, interrupted: Event | None = None) -> None:
        """Return when all ranks have come; raise RequestError on all that have where some do not.

        Whoever comes when others have given up is in the next meeting, as they are when they call
        again. All give up as soon as one of them is ``interrupted``.
        """
        with self._one_at_a_time:
            over = None
            while over is None:
                place = PrefixStore(f"number {self.number}", store)
                over = _Meeting(place, self, interrupted or Event()).hold(limit_s)
                self.number += 1
        if over != ALL_ARE_HERE:
            raise RequestError(over)


# By the place in the group's store, which is another one once its ranks have agreed on a token.
_callers: WeakKeyDictionary[dist.ProcessGroup, dict[str, Caller]] = WeakKeyDictionary()


def require_all_ranks(group: dist.ProcessGroup, call: str) -> None:
    """Return when all ranks have come to this call, or raise on all ranks that have.

    Nothing is sent on the group. Where it has no store for that, or no other ranks, as torch's fake
    one, nobody waits here. Whoever is
    interrupted here, as by Ctrl-C, takes back that it has come.

    Raises:
        RequestError: where some do not come within 80 % of the group's time-out.
        CollectiveError: where the store does not answer.
    """
    if group.size() == 1 or is_fake(group):
        return
    name = name_in_store(group, f"gradweave, {call}")
    callers = _callers.setdefault(group, {})
    caller = callers.setdefault(name, Caller(call, rank=group.rank(), ranks=group.size()))
    limit_s = OF_TIMEOUT * (group_timeout(group) or default_pg_timeout).total_seconds()
    interrupted = Event()

    def meet() -> None:
        store = cloned_store(group)
        if store is not None:
            caller.meet(PrefixStore(name, store), limit_s, interrupted=interrupted)

    try:
        in_time(meet, limit_s=limit_s + ANSWERED_WITHIN_S)
    except TimeoutError as error:
        raise _unanswered(caller, f"gives {error}") from error
    except (RuntimeError, OSError) as error:
        raise _unanswered(caller, f"says {str(error).partition(NEW_LINE)[0]}") from error
    finally:
        interrupted.set()  # where it still waits, in a thread of its own


def _unanswered(caller: Caller, how: str) -> CollectiveError:
    return CollectiveError(
        f"rank {caller.rank} cannot learn whether all ranks call {caller.call}(): the store of "
        f"their process group {how}; look whether its host is still there"
    )


class _Meeting:
    """One call of all ranks. It is over when all have come or one gives up, whichever is first.

    One key says which, and is written once, so all who have come do the same. The last rank that
    leaves takes all keys with it.
    """

    def __init__(self, store: Store, caller: Caller, interrupted: Event) -> None:
        self._store, self._call, self._interrupted = store, caller.call, interrupted
        self._rank, self._ranks = caller.rank, caller.ranks

    def hold(self, limit_s: float) -> str | None:
        """Return how it went: ALL_ARE_HERE or a complaint; None if it was over already."""
        store = self._store
        over = None
        if self._over() is None:
            store.set(str(self._rank), "")
            is_last = store.add(COME, 1) == self._ranks
            over = self._decided(ALL_ARE_HERE) if is_last else self._waited(limit_s)
        store.delete_key(str(self._rank))
        if store.add(LEFT, 1) == self._ranks:
            for key in (COME, TOLD, OVER, LEFT):
                store.delete_key(key)
        return over

    def _waited(self, limit_s: float) -> str:
        began_s, pause_s, may_tell = monotonic(), ASKED_EVERY_S, True
        while (over := self._over()) is None:
            waited_s = monotonic() - began_s
            if self._interrupted.is_set():
                return self._decided(f"{self._call}() was interrupted on rank {self._rank}")
            if waited_s >= limit_s:
                return self._decided(self._complaint(limit_s))
            if waited_s >= TOLD_AFTER_S and may_tell:
                may_tell = False
                if self._store.add(TOLD, 1) == 1:  # one of us is enough
                    came, missing = self._attendance()
                    but_not = named_ranks(missing) if missing else "others"
                    logger.warning(
                        "%s() was called on %s and not yet on %s; it waits for them",
                        self._call,
                        named_ranks(came),
                        but_not,
                    )
            sleep(pause_s)
            pause_s = min(pause_s * PATIENCE, ASKED_LATER_EVERY_S)
        return over

    def _over(self) -> str | None:
        return self._store.get(OVER).decode() if self._store.check([OVER]) else None

    def _decided(self, proposal: str) -> str:
        """Return how it went: as proposed, unless another rank was faster."""
        return self._store.compare_set(OVER, "", proposal).decode()

    def _complaint(self, limit_s: float) -> str:
        came, missing = self._attendance()
        if not missing:
            return f"{self._call}() was called on the last rank too late, after {limit_s:g} s"
        those = "that rank is" if len(missing) == 1 else "those ranks are"
        return (
            f"{self._call}() was called on {named_ranks(came)} and within {limit_s:g} s not on "
            f"{named_ranks(missing)}; call it on every rank, or look whether {those} still there"
        )

    def _attendance(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return which ranks have come, and which have not."""
        missing = self._missing(range(self._ranks))
        return sorted({*range(self._ranks)}.difference(missing)), missing

    def _missing(self, ranks: range) -> Sequence[int]:
        """Ask in halves: of a thousand ranks a few are missing, and many ask."""
        if self._store.check([str(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return [*self._missing(ranks[:half]), *self._missing(ranks[half:])]

"""Calls that all ranks make together: ranks meet through the store before anything is sent.

A rank that is alone in such a call would send what nobody waits for: it would end in an abort of
gloo's, perhaps in the middle of another rank's training, or wait silently.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from time import monotonic, sleep
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gradweave._src.comm.groups import meeting_name
from gradweave._src.comm.meetings import ALL_ARE_HERE, LONGEST_PAUSE_S, Meeting, named_ranks
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.in_time import in_time
from gradweave._src.torch_internals import is_fake, timeout_s

logger = logging.getLogger(__name__)

# Others may first evaluate or save their model; a rank that waits logs that after so long.
TOLD_AFTER_S = 10.0
# A rank waits for this share of the group's time-out. Ranks that go on training wait for it in
# their next message, and must not be the first to fail.
OF_TIMEOUT = 0.8
# How long the store may take to answer, on top of waiting for others.
ANSWERED_WITHIN_S = 5.0
TOLD = "told"  # the key by which one of those who wait says so, and no other
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

    def meet(
        self,
        store: Store,
        limit_s: float,
        *,
        waited_s: float = 0.0,
        interrupted: Event | None = None,
    ) -> None:
        """Return when all ranks have come; raise RequestError on all that have where some do not.

        Whoever comes when others have given up is in the next meeting, as they are when they call
        again. All give up as soon as one of them is ``interrupted``, or has waited ``limit_s``, of
        which it has ``waited_s`` already.

        Raises:
            RequestError: on all that have come, where some do not.
            TimeoutError: where an earlier call of this rank still waits for an answer of the store.
        """
        began_s = monotonic()
        if not self._one_at_a_time.acquire(timeout=max(limit_s - waited_s, 0.0)):
            raise TimeoutError("no answer to an earlier call of this rank")
        waited_s += monotonic() - began_s
        try:
            over = None
            while over is None:
                place = PrefixStore(f"number {self.number}", store)
                call = _CallOfAll(place, self, interrupted or Event())
                over = call.hold(limit_s, waited_s=waited_s)
                self.number += 1  # others go by how it has ended, whatever becomes of its keys
                with suppress(RuntimeError, OSError):
                    call.leave()
        finally:
            self._one_at_a_time.release()
        if over != ALL_ARE_HERE:
            raise RequestError(over)


# By the name under which ranks meet, which changes once they have agreed on a token.
_callers: WeakKeyDictionary[dist.ProcessGroup, dict[str, Caller]] = WeakKeyDictionary()


def require_all_ranks(group: dist.ProcessGroup, call: str) -> None:
    """Return when all ranks have come to this call, or raise on all ranks that have.

    Nothing is sent on the group. Where it has no store for that, or no other ranks, as torch's fake
    one, nobody waits here. A rank that is interrupted here, as by Ctrl-C, takes back that it has
    come.

    Raises:
        RequestError: where some do not come within 80 % of the group's time-out.
        CollectiveError: where the store does not answer.
    """
    if group.size() == 1 or is_fake(group):
        return
    limit_s = OF_TIMEOUT * timeout_s(group)
    interrupted = Event()

    def meet() -> None:
        began_s, store = monotonic(), cloned_store(group)
        if store is not None:
            name = _name_in(store, group, call, limit_s, interrupted)
            caller = Caller(call, rank=group.rank(), ranks=group.size())
            caller = _callers.setdefault(group, {}).setdefault(name, caller)
            place, waited_s = PrefixStore(name, store), monotonic() - began_s
            caller.meet(place, limit_s, waited_s=waited_s, interrupted=interrupted)

    try:
        in_time(meet, limit_s=limit_s + ANSWERED_WITHIN_S, interrupted=interrupted)
    except TimeoutError as error:
        raise _unanswered(group, call, f"gives {error}") from error
    except (RuntimeError, OSError) as error:
        raise _unanswered(group, call, f"says {str(error).partition(NEW_LINE)[0]}") from error
    finally:
        interrupted.set()  # where it still waits, in a thread of its own


def _name_in(
    store: Store, group: dist.ProcessGroup, call: str, limit_s: float, interrupted: Event
) -> str:
    """Return the name of the place where ranks meet, when rank 0 has said which that is."""
    until_s = monotonic() + limit_s
    while (name := meeting_name(group, store, f"gradweave, {call}")) is None:
        if interrupted.is_set() or monotonic() >= until_s:
            raise RequestError(_complaint(call, limit_s, [group.rank()], [0]))
        sleep(LONGEST_PAUSE_S)
    return name


def _complaint(call: str, limit_s: float, came: Sequence[int], missing: Sequence[int]) -> str:
    those = "that rank is" if len(missing) == 1 else "those ranks are"
    return (
        f"{call}() was called on {named_ranks(came)} and within {limit_s:g} s not on "
        f"{named_ranks(missing)}; call it on every rank, or look whether {those} still there"
    )


def _unanswered(group: dist.ProcessGroup, call: str, how: str) -> CollectiveError:
    return CollectiveError(
        f"rank {group.rank()} cannot learn whether all ranks call {call}(): the store of their "
        f"process group {how}; look whether its host is still there"
    )


class _CallOfAll:
    """One call of all ranks, at which each has a key that says that it has come."""

    def __init__(self, store: Store, caller: Caller, interrupted: Event) -> None:
        self._store, self._call, self._interrupted = store, caller.call, interrupted
        self._rank, self._ranks = caller.rank, caller.ranks
        self._meeting = Meeting(store, caller.ranks)
        self._has_told = self._has_come_before = False

    def hold(self, limit_s: float, *, waited_s: float) -> str | None:
        """Return how it went: ALL_ARE_HERE or a complaint; None if it was given up before.

        This rank has waited for so long already. It may have come before, too, and then lost its
        connection: it counts once, and if all had come, they have gone on.
        """
        ending = self._meeting.ending()
        if ending is not None:
            return ending if ending == ALL_ARE_HERE else None
        self._has_come_before = self._store.add(str(self._rank), 1) > 1
        if not self._has_come_before:
            self._meeting.come()
        return self._meeting.wait(partial(self._why_end, limit_s, waited_s))

    def leave(self) -> None:
        """Leave nothing in the store, if all ranks do."""
        self._store.delete_key(str(self._rank))
        self._meeting.leave(TOLD)

    def _why_end(self, limit_s: float, waited_before_s: float, waited_s: float) -> str | None:
        waited_s += waited_before_s
        if self._interrupted.is_set():
            return f"{self._call}() was interrupted on rank {self._rank}"
        if self._has_come_before and not self._missing(range(self._ranks)):
            return ALL_ARE_HERE  # though its coming may have been lost before it was counted
        if waited_s >= limit_s:
            return self._too_late(limit_s)
        if waited_s >= TOLD_AFTER_S and not self._has_told:
            self._has_told = True
            if self._store.add(TOLD, 1) == 1:  # one of us is enough
                self._tell_who_is_missing()
        return None

    def _tell_who_is_missing(self) -> None:
        came, missing = self._attendance()
        logger.warning(
            "%s() was called on %s and not yet on %s; it waits for them",
            self._call,
            named_ranks(came),
            named_ranks(missing) if missing else "others",
        )

    def _too_late(self, limit_s: float) -> str:
        came, missing = self._attendance()
        if not missing:
            return f"{self._call}() was called on the last rank too late, after {limit_s:g} s"
        return _complaint(self._call, limit_s, came, missing)

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

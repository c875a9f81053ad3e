"""What an exchange makes of everyone's selected elements, without a network.

An exchange is a schedule, whose blocks are sparse vectors, and what is done with them on arrival:
they are put beside each other, or merged where the schedule adds.

Note: the law
    Over all ranks, what is applied (once) and what is returned is what was sent, exactly, before
    anything is divided by the number of ranks. ``gtopk-tree-lossy`` breaks it where the paper does.

Note: who keeps what is dropped
    A merge keeps k elements of a sum and drops the others. In a swap, where a rank also sends what
    it adds to, every rank whose elements are in that sum computes the same merge, so each of them
    takes back what it has put in itself, once: later it has no part in the sums at that index.
    After a hand-over only the receiver knows what was dropped, so it keeps the sum. From then on
    the merged vector is what it has put in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gradweave._src.collectives import binomial, bruck, doubling
from gradweave._src.collectives.program import Kind, Step
from gradweave._src.collectives.schedule import Schedule
from gradweave._src.errors import RequestError
from gradweave._src.sparse.vectors import SparseVector, add, add_all, like, part_by, part_largest
from gradweave._src.vocabulary import alternatives


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one rank has after an exchange. If it is not finite, forget the step (roll back)."""

    applied: SparseVector  # sums over the ranks; the same bits on all of them
    returned: SparseVector  # goes back into this rank's residual

    @property
    def finite(self) -> bool:
        return self.applied.finite


class Participant(Protocol):
    """One rank in an exchange, which it goes through step by step of its program."""

    def outgoing(self, step: Step) -> list[SparseVector]: ...
    def arrived(self, step: Step, vectors: list[SparseVector]) -> None: ...
    def result(self) -> Exchanged: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange: who sends to whom, and a participant made from (its rank, what it sends, k).

    Ranks take part by ``program(schedule(ranks), rank)``.
    """

    schedule: Callable[[int], Schedule]
    participant: Callable[[int, SparseVector, int], Participant]


class Gathering:
    """A participant that gathers all vectors; all sums are applied, or the ``largest`` k."""

    def __init__(self, rank: int, mine: SparseVector, k: int, *, largest: bool) -> None:
        self.mine = mine
        self.applied_at_most = k if largest else None
        self.gathered = {rank: mine}

    def outgoing(self, step: Step) -> list[SparseVector]:
        return [self.gathered[rank] for rank in range(step.first, step.last)]

    def arrived(self, step: Step, vectors: list[SparseVector]) -> None:
        self.gathered.update(zip(range(step.first, step.last), vectors, strict=True))

    def result(self) -> Exchanged:
        # In the order of ranks, so that all of them round alike.
        total = add_all([self.gathered[rank] for rank in sorted(self.gathered)])
        if self.applied_at_most is None:
            return Exchanged(total, like(self.mine))
        return _own_returned(self.mine, part_largest(total, self.applied_at_most).inside)


class Merging:
    """A participant that adds vectors pair by pair, and keeps the k largest sums each time.

    ``lossy`` is the paper's way: a rank takes back what it has sent where nothing is applied. What
    a merge drops at an index that survives through other ranks is then in nobody's residual.
    """

    def __init__(self, rank: int, mine: SparseVector, k: int, *, lossy: bool) -> None:
        del rank
        self.mine, self.k, self.lossy = mine, k, lossy
        self.merged = mine
        self.live = mine  # of what this rank answers for, the part that is still in ``merged``
        self.returned = like(mine)

    def outgoing(self, step: Step) -> list[SparseVector]:
        del step
        return [self.merged]

    def arrived(self, step: Step, vectors: list[SparseVector]) -> None:
        (vector,) = vectors
        if step.kind is Kind.REPLACE:
            self.merged = vector
            return
        self.merged, dropped = part_largest(add(self.merged, vector), self.k)
        # See Note: who keeps what is dropped
        if step.sent_too:
            dropped, self.live = part_by(self.live, dropped.indices)
        else:
            self.live = self.merged
        self.returned = add(self.returned, dropped)

    def result(self) -> Exchanged:
        if self.lossy:
            return _own_returned(self.mine, self.merged)
        return Exchanged(self.merged, self.returned)


def _own_returned(mine: SparseVector, applied: SparseVector) -> Exchanged:
    return Exchanged(applied, part_by(mine, applied.indices).outside)


EXCHANGES: Mapping[str, Exchange] = {
    "topk": Exchange(bruck.all_gather, partial(Gathering, largest=False)),
    "gtopk": Exchange(doubling.all_reduce, partial(Merging, lossy=False)),
    "gtopk-tree": Exchange(binomial.all_reduce, partial(Merging, lossy=False)),
    "gtopk-tree-lossy": Exchange(binomial.all_reduce, partial(Merging, lossy=True)),
    "gtopk-all-gather": Exchange(bruck.all_gather, partial(Gathering, largest=True)),
}


def find_exchange(name: str) -> Exchange:
    if name not in EXCHANGES:
        raise RequestError(f"no exchange {name!r}{alternatives(name, EXCHANGES)}")
    return EXCHANGES[name]

"""Every order in which ranks may ask one store: each order is one run of the real code."""

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch.distributed as dist


class StoreInTurns:
    """A store in this process, seen by one rank that waits for its turn before it asks.

    Only what it asks of keys that ranks share takes a turn; what it does with its own, nobody else
    decides by.
    """

    def __init__(self, store: dist.Store, turn: Callable[[Callable[[], Any]], Any]) -> None:
        self._store, self._turn = store, turn

    def below(self, prefix: str) -> "StoreInTurns":
        """Return what PrefixStore makes of a store."""
        return StoreInTurns(dist.PrefixStore(prefix, self._store), self._turn)

    def check(self, keys: Sequence[str]) -> bool:
        if any(key.isdigit() for key in keys):
            return bool(self._store.check(keys))
        return bool(self._turn(lambda: self._store.check(keys)))

    def add(self, key: str, amount: int) -> int:
        if key.isdigit():
            return int(self._store.add(key, amount))
        return int(self._turn(lambda: self._store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._turn(lambda: self._store.compare_set(key, expected, desired)))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))


class _Run:
    """One run: ranks are threads of which exactly one goes on at a time."""

    def __init__(self, acts: Sequence[Callable[[StoreInTurns], object]]) -> None:
        self.store = dist.HashStore()
        self.results: dict[int, object] = {}
        self.heard: list[list[object]] = [[] for _ in acts]
        self._stopped: SimpleQueue[int] = SimpleQueue()  # whoever has come to its turn, or its end
        self._turns = [Semaphore(0) for _ in acts]
        self._threads = [
            Thread(target=self._rank, args=(rank, act), daemon=True)
            for rank, act in enumerate(acts)
        ]
        for thread in self._threads:
            thread.start()
            self._stopped.get()

    def _rank(self, rank: int, act: Callable[[StoreInTurns], object]) -> None:
        def turn(ask: Callable[[], object]) -> object:
            self._stopped.put(rank)
            self._turns[rank].acquire()
            answer = ask()
            self.heard[rank].append(answer)
            return answer

        try:
            self.results[rank] = act(StoreInTurns(self.store, turn))
        except Exception as error:  # the test's to judge
            self.results[rank] = error
        self._stopped.put(rank)

    def all_heard(self) -> tuple[tuple[object, ...], ...]:
        return tuple(sorted(map(tuple, self.heard), key=repr))

    def all_results(self) -> list[object]:
        return [self.results[rank] for rank in range(len(self._threads))]

    def waiting(self) -> list[int]:
        return [rank for rank in range(len(self._threads)) if rank not in self.results]

    def go_on(self, rank: int) -> None:
        self._turns[rank].release()
        self._stopped.get()

    def to_the_end(self) -> None:
        while waiting := self.waiting():
            self.go_on(waiting[0])
        for thread in self._threads:
            thread.join()


def every_end(
    acts: Callable[[], Sequence[Callable[[StoreInTurns], object]]],
) -> Iterator[tuple[list[int], list[object], dist.Store]]:
    """Yield how it ends in every order: the order, each rank's result or error, and the store.

    Ranks do alike. So an order is not gone on with where another one has led as many ranks to the
    same: what they have heard decides what they do, and what is in the store.
    """
    seen = set()
    begun: list[list[int]] = [[]]
    while begun:
        order = begun.pop()
        run = _Run(acts())
        for rank in order:
            run.go_on(rank)
        while (heard := run.all_heard()) not in seen:
            seen.add(heard)
            first, *others = run.waiting() or [None]
            if first is None:
                yield order, run.all_results(), run.store
                break
            begun += [[*order, rank] for rank in others]
            order.append(first)
            run.go_on(first)
        run.to_the_end()

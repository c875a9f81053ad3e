"""Where ranks find each other and compare notes: a store, as torch has it, with time-outs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec

Value = TypeVar("Value")


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Lost(Exception):
    """Raised where ranks that have come do not answer any more."""

    def __init__(self, ranks: Sequence[int], doing: str) -> None:
        super().__init__(f"ranks {list(ranks)} fell silent while {doing}")
        self.ranks, self.doing = tuple(ranks), doing


class Meeting:
    """The ranks that are there; all of them call the same methods in the same order."""

    def __init__(self, store: Store, *, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank, self.ranks = rank, list(ranks)
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._topics = 0

    def gather(
        self, doing: str, value: Value, kind: type[Value], *, timeout_s: float | None = None
    ) -> dict[int, Value]:
        """Return what every rank says; raise Lost, which names what was done, if one does not."""
        timeout = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        self._topics += 1
        keys = [f"{self._topics}/{rank}" for rank in self.ranks]
        self._store.set(f"{self._topics}/{self.rank}", msgspec.json.encode(value).decode())
        try:
            self._store.wait(keys, timeout)
            texts = self._store.multi_get(keys)
        except RuntimeError as error:
            raise Lost(self._silent(keys), doing) from error
        found = [msgspec.json.decode(text, type=kind) for text in texts]
        return dict(zip(self.ranks, found, strict=True))

    def together(self, doing: str) -> None:
        """Wait until all ranks are here."""
        self.gather(doing, value=True, kind=bool)

    def leave(self) -> None:
        """Say that nothing more is wanted of the store; the rank that holds it waits for that."""
        self._store.set(f"left/{self.rank}", "")

    def wait_until_left(self, *, but: Sequence[int] = ()) -> None:
        """Wait for the others a while, so that the store outlives what they ask of it."""
        keys = [f"left/{rank}" for rank in self.ranks if rank not in but]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:
            return  # lost ranks have been named before

    def _silent(self, keys: list[str]) -> list[int]:
        try:
            return [
                rank
                for rank, key in zip(self.ranks, keys, strict=True)
                if not self._store.check([key])
            ]
        except RuntimeError:  # the store itself is gone, and rank 0 holds it
            return self.ranks[:1]


def assemble(store: Store, *, rank: int, world_size: int, timeout_s: float) -> list[int] | None:
    """Return the ranks that rank 0 saw come in time; None on a rank that came too late."""
    store.set(f"come/{rank}", "")
    everyone = list(range(world_size))
    if rank == 0:
        store.set("present", msgspec.json.encode(_come(store, everyone, timeout_s)).decode())
    # Rank 0 may have begun to wait later than this rank.
    store.wait(["present"], timedelta(seconds=2 * timeout_s))
    present = msgspec.json.decode(store.multi_get(["present"])[0], type=list[int])
    return present if rank in present else None


def _come(store: Store, everyone: list[int], timeout_s: float) -> list[int]:
    try:
        store.wait([f"come/{rank}" for rank in everyone], timedelta(seconds=timeout_s))
    except RuntimeError:
        return [rank for rank in everyone if store.check([f"come/{rank}"])]
    return everyone

"""Calls that end in time, whatever they wait for."""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from gradweave.doctor.meeting import Store

Result = TypeVar("Result")

# Beyond what the call itself was told.
GRACE_S = 5.0


def in_time(call: Callable[[], Result], *, limit_s: float) -> Result:
    """Return what it returns; TimeoutError when it has not, and then it is left behind.

    In a thread that nobody joins: torch's stores and groups wait in C++ for ever when their host is
    cut off, in spite of the time-outs they were given.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 the caller's to judge
            errors.append(error)

    thread = Thread(target=act, name="gradweave call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]


class StoreInTime:
    """A store of torch's whose calls end; after one that did not, all fail at once."""

    def __init__(self, store: Store, *, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._is_stuck = False

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._call(lambda: self._store.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._call(lambda: self._store.wait(keys, timeout), timeout.total_seconds())

    def _call(self, call: Callable[[], Result], timeout_s: float | None = None) -> Result:
        if self._is_stuck:
            raise RuntimeError("the store has not answered before")
        limit_s = (self._timeout_s if timeout_s is None else timeout_s) + GRACE_S
        try:
            return in_time(call, limit_s=limit_s)
        except TimeoutError as error:
            self._is_stuck = True
            raise RuntimeError(str(error)) from None

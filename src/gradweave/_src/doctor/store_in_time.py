"""A store whose calls end, also where its host is cut off."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from gradweave._src.doctor.meeting import Store
from gradweave._src.in_time import in_time

Result = TypeVar("Result")

# A call may take so much longer than its own time-out.
GRACE_S = 5.0


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

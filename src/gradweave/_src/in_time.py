"""Calls that end in time, whatever they wait for."""

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_time(call: Callable[[], Result], *, limit_s: float) -> Result:
    """Return what the call returns; raise TimeoutError, and leave it behind, if it takes too long.

    It runs in a thread that nobody joins: torch's stores and groups wait in C++ for ever when their
    host is cut off, in spite of the time-outs they were given.
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

"""Calls that end in time, whatever they wait for."""

from collections.abc import Callable
from threading import Event, Thread
from typing import TypeVar

Result = TypeVar("Result")

# How long a call that was interrupted may take to tell others.
MOMENT_S = 2.0


def in_time(
    call: Callable[[], Result], *, limit_s: float, interrupted: Event | None = None
) -> Result:
    """Return what the call returns; raise TimeoutError, and leave it behind, if it takes too long.

    It runs in a thread that nobody joins: torch's stores and groups wait in C++ for ever when their
    host is cut off, in spite of the time-outs they were given. If its caller is interrupted, as by
    Ctrl-C, ``interrupted`` is set, and the call has a moment to act on that: the script may end.
    """
    results: list[Result] = []
    errors: list[Exception] = []
    is_over = Event()

    def act() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 the caller's to judge
            errors.append(error)
        finally:
            is_over.set()

    try:
        Thread(target=act, name="gradweave call", daemon=True).start()
        is_over.wait(limit_s)  # not join(), after which an interrupted thread counts as ended
    except BaseException:
        if interrupted is not None:
            interrupted.set()
            is_over.wait(MOMENT_S)
        raise
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]

"""Calls that end in time, also when somebody hits Ctrl-C."""

import os
import signal
from threading import Event, Thread

import pytest

from gradweave._src.in_time import in_time

LONG_S = 60.0


def test_what_a_call_returns_or_raises():
    assert in_time(lambda: 3, limit_s=LONG_S) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, limit_s=LONG_S)


def test_what_takes_too_long_is_left_behind():
    is_over = Event()
    with pytest.raises(TimeoutError):
        in_time(lambda: is_over.wait(LONG_S), limit_s=0.01)
    is_over.set()


def test_who_is_interrupted_has_a_moment_to_tell_others():
    """All of it is over when the caller learns that it was interrupted, and the script may end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted, waits, told = Event(), Event(), []

    def call():
        waits.set()
        assert interrupted.wait(LONG_S)
        Event().wait(0.05)
        told.append("others")

    def hit():
        waits.wait(LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        Thread(target=hit, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            in_time(call, limit_s=LONG_S, interrupted=interrupted)
        assert told == ["others"]
    finally:
        signal.signal(signal.SIGINT, before)

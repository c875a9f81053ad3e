"""Threads that have something to do are waited for, others are not, and none for ever."""

import threading
import time

import pytest

from gradweave._src.comm.letting_go import LOOKS, let_threads_go

ENOUGH_S = 60.0


@pytest.fixture
def busy():
    """Another thread that computes until its event is set, and for at most a minute."""
    enough = threading.Event()

    def compute():
        until_s = time.monotonic() + ENOUGH_S
        while not enough.is_set() and time.monotonic() < until_s:
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    yield thread, enough
    enough.set()
    thread.join()


def test_a_thread_that_runs_is_waited_for(busy):
    thread, enough = busy
    threading.Timer(0.3, enough.set).start()
    let_threads_go(ENOUGH_S)
    assert not thread.is_alive()


def test_not_for_ever(busy):
    thread, _ = busy
    let_threads_go(0.1)
    assert thread.is_alive()


def test_a_thread_that_waits_is_not_waited_for(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    monkeypatch.setattr("gradweave._src.comm.letting_go._threads", lambda: [thread.native_id])
    try:
        let_threads_go(ENOUGH_S)
    finally:
        done.set()
        thread.join()
    assert len(slept) >= LOOKS

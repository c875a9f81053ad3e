"""Time for gloo's own threads to let go of messages that are done.

When a message is done, the thread that has sent it holds its tensors for another moment, and needs
Python's lock to let go of them. Code that drops the group's last reference meanwhile, as torch's
reducer may, waits for that thread while it holds the lock, so both wait for ever. A script that
ends meanwhile stops the thread in a way that C++ takes for a crash. (pytorch issue 190489)
"""

import atexit
import threading
import time
from pathlib import Path

# A thread that is ready to run may wait long for a core on a busy machine.
MOST_S = 1.0
LOOK_EVERY_S = 0.005
# A thread sleeps for a moment between two locks, too, so one look is not enough.
LOOKS = 4
TASKS = Path("/proc/self/task")
RUNNING = "R"


def let_threads_go(most_s: float = MOST_S) -> None:
    """Sleep until no other thread of this process has anything to do, but not for ever."""
    until_s = time.monotonic() + most_s
    looks = 0
    while looks < LOOKS and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)  # without Python's lock
        looks = 0 if _others_run() else looks + 1


def _others_run() -> bool:
    mine = threading.get_native_id()
    return any(_state(thread) == RUNNING for thread in _threads() if thread != mine)


def _threads() -> list[int]:
    try:
        return [int(folder.name) for folder in TASKS.iterdir()]
    except FileNotFoundError:  # not on Linux, where the time must do
        return []


def _state(thread: int) -> str:
    try:
        stat = (TASKS / str(thread) / "stat").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""
    return stat.rpartition(")")[2].split()[0]  # its name may have anything in it


atexit.register(let_threads_go)

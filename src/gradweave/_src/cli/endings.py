"""How the command line ends when it is told to: what it has begun is closed, and little is said."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Told(BaseException):
    """Raised when a signal has told this process to end; blocks are left as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Have signals that end the process leave the block by an exception first.

    So temporary folders and clusters are gone, and a parent that waits for this process still sees
    the signal that ended it. A second signal ends it at once. Ranks of torchrun are left out:
    Python cannot raise anything while it waits for a message, and torchrun would wait for that.
    """
    if "RANK" in os.environ or current_thread() is not main_thread():
        yield
        return
    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    except Told as told:
        os.kill(os.getpid(), told.number)
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    for one in ENDING:
        if signal.getsignal(one) is _leave:
            signal.signal(one, signal.SIG_DFL)
    raise Told(number)

"""Ctrl-C for a rank that waits, as from its keyboard."""

import os
import signal
from threading import Thread


def interrupt_when_there(store, *keys):
    """Interrupt the main thread of this process once the store has these keys."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        store.wait([*keys])
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()

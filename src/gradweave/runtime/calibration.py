"""A calibration that runs beside the training."""

import atexit
from collections.abc import Callable
from threading import Thread
from typing import Self

from gradweave.network import Network

# All ranks stop calibrating together, so one that is late keeps the others waiting.
STOPPED_WITHIN_S = 10.0


class Ended(Exception):
    """Nobody needs the calibration any more."""


class Calibration:
    """Runs beside the training, on a thread and a group of its own, for the length of a block.

    A script may end while it runs. Python then stops threads in a way that torch's C++ takes for a
    crash, so the thread is ended before that.
    """

    def __init__(self, run: Callable[[], Network], *, end: Callable[[], None]) -> None:
        self._end = end
        self._found: Network | None = None
        self.failure: BaseException | None = None

        def work() -> None:
            try:
                self._found = run()
            except Ended:
                pass
            except BaseException as error:  # noqa: BLE001 the course gives up then
                self.failure = error

        self._thread = Thread(target=work, name="gradweave calibration", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        atexit.register(self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._stop)
        self._stop()

    def _stop(self) -> None:
        self._end()
        self._thread.join(timeout=STOPPED_WITHIN_S)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def network(self) -> Network:
        assert self._found is not None
        return self._found

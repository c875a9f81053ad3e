"""What messages cost, measured on a thread and a group of our own while the model trains."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread, current_thread
from typing import TypedDict

from gradweave import collectives
from gradweave.comm import Communicator
from gradweave.comm.own_group import OwnGroup
from gradweave.measure.network import calibrate
from gradweave.network import Network
from gradweave.planning import BOTH_PASSES_COLLECTIVE, OPERATIONS
from gradweave.runtime.noticeboard import Ended, Turns
from gradweave.vocabulary import KIB, MIB, Passes

CALIBRATION_REPEATS = 3
LEAST_CALIBRATED_BYTES, MOST_CALIBRATED_BYTES = 64 * KIB, 16 * MIB
# A smaller model takes short steps, and little can be gained: calibrating must not last longer.
SMALL_MODEL_BYTES = 1 * MIB
SMALL_STREAM_S = 0.004
SMALL_REPEATS = 2
# Beside the backend's own: what is worth the thread it needs, for small messages and for tiers.
AUTO_COLLECTIVES = ("native", "recursive-doubling")
AUTO_TIERED = "blueconnect"
# Ranks stop calibrating together, each at its next message.
STOPPED_WITHIN_S = 5.0


class Effort(TypedDict, total=False):
    """How thoroughly to calibrate, as ``calibrate`` takes it."""

    repeats: int
    stream_s: float
    link_bytes: tuple[int, int, int]


class Calibration:
    """Measures messages while all ranks compute, until it is done or closed.

    Ranks take turns through ``turns``, so no rank's training ever waits for this, and a rank that
    ends takes nobody with it. A script may end while it runs: Python then stops threads in a way
    that torch's C++ takes for a crash, so the thread is ended before that.
    """

    def __init__(
        self,
        own_groups: Sequence[OwnGroup],
        turns: Turns,
        *,
        collective: str | None,
        passes: Passes,
        model_bytes: int,
    ) -> None:
        self.network: Network | None = None
        self.failure: str | None = None
        self._turns, self._is_computing = turns, Event()
        self._own_groups, self._collective, self._passes = own_groups, collective, passes
        self._largest_bytes = min(max(model_bytes, LEAST_CALIBRATED_BYTES), MOST_CALIBRATED_BYTES)
        self._thread = Thread(target=self._run, name="gradweave calibration", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def computing_begins(self) -> None:
        """This rank computes from now on."""
        self._is_computing.set()

    def computing_ends(self) -> None:
        """Messages that are measured from now on would meet those of the training."""
        if not self._turns.has_ended:
            self._is_computing.clear()

    def close(self) -> None:
        """End it, done or not."""
        atexit.unregister(self.close)
        self._turns.end()
        self._is_computing.set()
        if self._thread is not current_thread():  # whoever is collected as garbage is so anywhere
            self._thread.join(timeout=STOPPED_WITHIN_S)

    def _run(self) -> None:
        try:
            self._turns.take()
            self.network = self._calibrated()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 the session is told
            self.failure = f"calibrating failed: {error}"
            # Others may be waiting for a message from here; a closed connection tells them.
            for own_group in self._own_groups:
                own_group.close()

    def _calibrated(self) -> Network:
        first, *others = [Communicator(own_group.group) for own_group in self._own_groups]
        self._own_groups[0].topology = first.topology
        return calibrate(
            first.group,
            name="calibrated in training",
            ways=collectives.ways(OPERATIONS[self._passes], self._collectives(first)),
            largest_bytes=self._largest_bytes,
            beside={"compute": self._beside_computing},
            communicator=first,
            other_lanes=others,
            before_each=self._turns.take,
            **self._effort(),
        )

    def _effort(self) -> Effort:
        """What to leave out where the model is small."""
        largest = self._largest_bytes
        if largest >= SMALL_MODEL_BYTES:
            return {"repeats": CALIBRATION_REPEATS}
        return {
            "repeats": SMALL_REPEATS,
            "stream_s": SMALL_STREAM_S,
            "link_bytes": (KIB, largest // 4, largest),
        }

    @contextmanager
    def _beside_computing(self) -> Iterator[None]:
        """While all ranks compute; the first that ends ends it for all."""
        self._is_computing.wait()
        self._turns.take()
        yield

    def _collectives(self, communicator: Communicator) -> tuple[str, ...]:
        if self._collective is not None:
            return (self._collective,)
        if self._passes == "both":
            return (BOTH_PASSES_COLLECTIVE,)
        is_tiered = len(communicator.topology.factors) > 1
        return (*AUTO_COLLECTIVES, AUTO_TIERED) if is_tiered else AUTO_COLLECTIVES

"""A few messages beside the training, of sizes that it does not send itself."""

import atexit
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from threading import Event, Thread, current_thread

import torch
from msgspec import Struct

from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.lanes import Lanes
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.small_messages import largest
from gradweave._src.errors import CollectiveError
from gradweave._src.measure.network import send_in_turn
from gradweave._src.planning import OPERATIONS
from gradweave._src.runtime.driving.activity import Activity
from gradweave._src.runtime.driving.noticeboard import Ended, Turns
from gradweave._src.session.commands import Failed, Probe, Probed
from gradweave._src.session.learning import MESSAGES_PER_PROBE, STREAMED, MessageSample
from gradweave._src.torch_internals import HOST, named_range
from gradweave._src.vocabulary import Way

# How often each size is sent if there is time for it.
MOST_REPEATS = 3
# Ranks stop together, at their next turn; this is how long that may take.
STOPPED_WITHIN_S = 5.0


class RankProbe(Struct, frozen=True, kw_only=True, tag=True):
    """What one rank has measured together with all others, so that it is the same on all."""

    samples: tuple[MessageSample, ...]
    taken_s: float = 0.0
    sent_bytes: int = 0


class Budget:
    """What may be sent, and what has been: bytes, and seconds on the slowest rank."""

    def __init__(self, command: Probe) -> None:
        self.spent_s, self.sent_bytes = 0.0, 0
        self._command = command
        self._taken_of: dict[int, float] = {}  # by size

    def spend(self, size: int, taken_s: float) -> None:
        self._taken_of[size] = taken_s
        self.spent_s += taken_s
        self.sent_bytes += self._bytes_of(size)

    def allows(self, sizes: Sequence[int]) -> bool:
        """Return whether these will be within what is allowed, as far as other sizes tell."""
        return (
            self.spent_s + sum(map(self._expected_s, sizes)) <= self._command.within_s
            and self.sent_bytes + sum(map(self._bytes_of, sizes)) <= self._command.within_bytes
        )

    def _expected_s(self, size: int) -> float:
        longest = max(self._taken_of)
        return self._taken_of.get(size, self._taken_of[longest] * size / longest)

    def _bytes_of(self, size: int) -> int:
        return len(self._command.ways) * MESSAGES_PER_PROBE * size


class Probing(Activity):
    """Sends on a thread and groups of its own, at the beginning of forward passes.

    It is for the CPU only: accelerators have `queued_probing`.

    The network is free then, and the processors are as busy as when gradients travel. Ranks take
    turns through ``turns``, so no rank's training ever waits for this, and a rank that ends takes
    nobody with it. A script may end while it runs: Python then stops threads in a way that torch's
    C++ takes for a crash, so the thread is ended before that.
    """

    def __init__(self, command: Probe, own_groups: Sequence[OwnGroup], turns: Turns) -> None:
        self._command, self._own_groups, self._turns = command, own_groups, turns
        self._budget = Budget(command)
        self._found: RankProbe | Failed | None = None
        self._forward_began = Event()
        self._thread = Thread(target=self._run, name="gradweave probing", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def forward_begins(self, batch_size: int) -> None:
        del batch_size
        self._forward_began.set()

    def part(self) -> RankProbe | Failed | None:
        return self._found

    def agreed(self, parts: Sequence[RankProbe]) -> Probed:
        return Probed(parts[0].samples, parts[0].taken_s, parts[0].sent_bytes)

    def close(self) -> None:
        """End it, done or not."""
        atexit.unregister(self.close)
        self._turns.end()
        self._forward_began.set()
        if self._thread is not current_thread():  # whoever is collected as garbage is so anywhere
            self._thread.join(timeout=STOPPED_WITHIN_S)

    def _run(self) -> None:
        try:
            samples = tuple(self._samples())
            self._found = RankProbe(
                samples=samples,
                taken_s=self._budget.spent_s,
                sent_bytes=self._budget.sent_bytes,
            )
        except Ended:
            self._found = RankProbe(samples=())
        except BaseException as error:  # noqa: BLE001 the session is told
            self._found = Failed(
                f"messages beside the training failed: {error}",
                may_come_of_others=isinstance(error, RuntimeError | CollectiveError),
            )
            # Others may be waiting for a turn with this rank, or for a message from here; a closed
            # connection tells them.
            with suppress(RuntimeError, OSError):  # of the store, which others have lost as well
                self._turns.refuse()
            for own_group in self._own_groups:
                own_group.close()

    def _samples(self) -> Iterator[MessageSample]:
        """Time one size in each forward pass, until all have had their repeats or it is enough."""
        self._wait_for_forward()
        communicators = [
            Communicator(own_group.group, topology=own_group.topology)
            for own_group in self._own_groups
        ]
        is_sharded = any(way.operation in OPERATIONS["both"] for way in self._command.ways)
        lanes = Lanes(communicators if is_sharded else ())
        try:
            for number in count():
                repeat, place = divmod(number, len(self._command.sizes_bytes))
                size = self._command.sizes_bytes[place]
                is_sure = repeat == 0 and place < self._command.required_sizes
                if repeat == MOST_REPEATS or not (is_sure or self._budget.allows([size])):
                    return
                if number > 0:
                    self._wait_for_forward()
                began_s = time.perf_counter()
                for way in self._command.ways:
                    with named_range("gradweave: probing %d bytes", size):
                        yield from self._probed(communicators[0], lanes, way, size)
                group = communicators[0].group
                (taken_s,) = largest(group, [time.perf_counter() - began_s])
                self._budget.spend(size, taken_s)
        finally:
            lanes.close(STOPPED_WITHIN_S)

    def _wait_for_forward(self) -> None:
        """Wait until all ranks are in a forward pass that nothing was sent beside."""
        self._forward_began.wait()
        self._forward_began.clear()
        self._turns.take()

    def _probed(
        self, communicator: Communicator, lanes: Lanes, way: Way, nbytes: int
    ) -> Iterator[MessageSample]:
        messages = torch.zeros(STREAMED, max(1, nbytes // 4), device=HOST)

        def timed_s(count: int) -> float:
            started_s = time.perf_counter()
            send_in_turn(communicator, lanes, way, list(messages[:count]))
            return time.perf_counter() - started_s

        timed_s(1)  # brings ranks together
        alone_s, stream_s = largest(communicator.group, [timed_s(1), timed_s(STREAMED)])
        for messages_sent, taken_s in ((1, alone_s), (STREAMED, stream_s)):
            yield MessageSample(
                operation=way.operation,
                collective=way.collective,
                sizes_bytes=(nbytes,) * messages_sent,
                taken_s=taken_s,
            )

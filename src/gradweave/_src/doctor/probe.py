"""Plain TCP messages between ranks: each is answered when all of it has come.

They are not gloo's: a gloo group needs every rank to reach every other, and which ranks do not is
what we want to know.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import NamedTuple, Self

from msgspec import Struct

_HEADER_BYTES = 8
_PIECE = memoryview(bytes(2**20))
TOKEN_BYTES = 16

FIRST_BYTES = 16 * 2**10
LARGEST_BYTES = 64 * 2**20
# Long enough for bursts that switches and shapers let pass, and for a core that was elsewhere.
WANTED_S = 0.06
ENOUGH_S = 0.03
MOST_PAIR_S = 2.0
PINGS = 20
LEAST_PINGS = 3
PINGING_S = 0.05
# While all ranks send at once, they send for so long, in messages of such a length.
TOGETHER_S = 0.12
CHUNK_S = 0.03


class Unanswered(Exception):
    """Raised where a rank could not be reached, or a message to it was not answered."""


class Sent(NamedTuple):
    """How long a message took, and how much of that the busier end's core worked on it."""

    taken_s: float
    worked_s: float


class Reading(Struct, frozen=True):
    round_trip_s: float
    bytes_per_s: float
    core_share: float  # of the time in which the busier end's core worked


class Listener:
    """Answers messages in threads of its own until it is closed."""

    def __init__(self, address: str, *, rank: int, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._server.getsockname()[1]
        self._greeting = rank.to_bytes(_HEADER_BYTES, "big")
        self._token = token
        self._peers: list[socket.socket] = []
        Thread(target=self._accept, name="gradweave listener", daemon=True).start()

    def close(self) -> None:
        for end in (self._server, *self._peers):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits there
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._server.accept()
                self._peers.append(peer)
                Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        piece = memoryview(bytearray(len(_PIECE)))
        with suppress(OSError), peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not _read(peer, piece[:TOKEN_BYTES]) or piece[:TOKEN_BYTES] != self._token:
                return
            peer.sendall(self._greeting)
            while _read(peer, piece[:_HEADER_BYTES]):
                began_s = time.thread_time()
                left = int.from_bytes(piece[:_HEADER_BYTES], "big")
                while left:
                    if not (got := peer.recv_into(piece[: min(left, len(piece))])):
                        return
                    left -= got
                worked_s = time.thread_time() - began_s
                peer.sendall(round(worked_s * 1e9).to_bytes(_HEADER_BYTES, "big"))


class Line:
    """A connection to another rank's listener."""

    def __init__(
        self, address: str, port: int, *, rank: int, token: bytes, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        try:
            self._socket = socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            raise Unanswered(self._reason(error)) from error
        try:
            greeted_by = self._greeted_by(token)
        except OSError as error:
            self.close()
            raise Unanswered(self._reason(error)) from error
        if greeted_by != rank:
            self.close()
            raise Unanswered(f"somebody else than rank {rank} listens there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, nbytes: int) -> Sent:
        """Send a message, and return when the other side has said that it has all of it."""
        answer = memoryview(bytearray(_HEADER_BYTES))
        began_s, began_work_s = time.perf_counter(), time.thread_time()
        try:
            self._socket.sendall(nbytes.to_bytes(_HEADER_BYTES, "big"))
            for begin in range(0, nbytes, len(_PIECE)):
                self._socket.sendall(_PIECE[: nbytes - begin])
            is_answered = _read(self._socket, answer)
        except OSError as error:
            raise Unanswered(f"{self._reason(error)} while {nbytes:,} bytes were sent") from error
        if not is_answered:
            raise Unanswered(f"it closed the connection while {nbytes:,} bytes were sent")
        taken_s, worked_s = time.perf_counter() - began_s, time.thread_time() - began_work_s
        return Sent(taken_s, max(worked_s, int.from_bytes(answer, "big") * 1e-9))

    def _greeted_by(self, token: bytes) -> int | None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(token)
        greeting = memoryview(bytearray(_HEADER_BYTES))
        return int.from_bytes(greeting, "big") if _read(self._socket, greeting) else None

    def _reason(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        return (error.strerror or str(error)).lower()


def read_alone(line: Line, *, now_s: Callable[[], float] = time.perf_counter) -> Reading:
    """Measure the fastest of some round trips, then the rate by messages that grow long enough."""
    began_s = now_s()
    line.send(0)
    trips_s: list[float] = []
    while len(trips_s) < PINGS and (len(trips_s) < LEAST_PINGS or now_s() - began_s < PINGING_S):
        trips_s.append(line.send(0).taken_s)
    round_trip_s = min(trips_s)
    nbytes = FIRST_BYTES
    while True:
        taken_s, worked_s = line.send(nbytes)
        moving_s = _moving_s(taken_s, round_trip_s)
        is_long = moving_s >= ENOUGH_S or now_s() - began_s > MOST_PAIR_S
        if is_long or nbytes == LARGEST_BYTES:
            return Reading(round_trip_s, nbytes / moving_s, worked_s / taken_s)
        # By a factor of eight at most: what passes at once in a burst says little of the rest.
        wanted_bytes = max(2 * nbytes, round(nbytes * WANTED_S / moving_s))
        nbytes = min(LARGEST_BYTES, 8 * nbytes, wanted_bytes)


def read_together(
    line: Line,
    *,
    round_trip_s: float,
    expected_bytes_per_s: float,
    now_s: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the bytes per second of messages that follow each other, while others send too."""
    chunk_bytes = min(LARGEST_BYTES, max(FIRST_BYTES, round(expected_bytes_per_s * CHUNK_S)))
    began_s = now_s()
    moving_s = 0.0
    sent_bytes = 0
    while now_s() - began_s < TOGETHER_S:
        taken_s, _ = line.send(chunk_bytes)
        moving_s += _moving_s(taken_s, round_trip_s)
        sent_bytes += chunk_bytes
    return sent_bytes / moving_s


def _moving_s(taken_s: float, round_trip_s: float) -> float:
    """Return the time without the round trip, but never next to nothing, as chance may have it."""
    return max(taken_s - round_trip_s, 0.1 * taken_s)


def _read(end: socket.socket, into: memoryview) -> bool:
    """Fill the memory and return True; return False when the other side has closed before."""
    while into:
        if not (got := end.recv_into(into)):
            return False
        into = into[got:]
    return True

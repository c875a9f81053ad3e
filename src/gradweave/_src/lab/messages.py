"""What the launcher and its fabric say to each other: a packet for a request, one for its answer.

A request that starts a rank carries three open files: the rank's output, its errors, and where the
fabric writes the rank's exit status. So output never passes through the fabric.
"""

import socket
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from gradweave._src.lab.readings import Rates, SentBytes
from gradweave._src.lab.spec import ClusterSpec

MAX_PACKET_BYTES = 2**20
FILES_PER_RANK = 3


class Build(Struct, frozen=True, tag=True):
    spec: ClusterSpec
    loopback: bool


class StartRank(Struct, frozen=True, tag=True):
    job: int
    rank: int
    program: bytes
    arguments: list[bytes]
    environment: dict[bytes, bytes]
    directory: bytes


class Stop(Struct, frozen=True, tag=True):
    """End the job's ranks by SIGTERM, and after ``grace_s`` by SIGKILL."""

    job: int
    grace_s: float


class Kill(Struct, frozen=True, tag=True):
    """End these ranks, of whichever job, at once."""

    ranks: list[int]


class Plug(Struct, frozen=True, tag=True):
    node: int
    plugged: bool


class SetRate(Struct, frozen=True, tag=True):
    node: int
    bits_per_s: int


class ReadSent(Struct, frozen=True, tag=True):
    pass


class ReadRates(Struct, frozen=True, tag=True):
    node: int


class Answer(Struct, frozen=True):
    problem: str | None = None  # what the user is told
    forbidden: bool = False  # whether the machine, not the request, is the problem
    sent: SentBytes | None = None
    rates: Rates | None = None


Request = Build | StartRank | Stop | Kill | Plug | SetRate | ReadSent | ReadRates


class Received(Struct, frozen=True):
    number: int
    request: Request
    files: list[int]


# The number tells an answer from a late one, to a request whose sender was interrupted.
_requests = msgspec.msgpack.Decoder(tuple[int, Request])
_answers = msgspec.msgpack.Decoder(tuple[int, Answer])


def send_request(
    connection: socket.socket, number: int, request: Request, files: Sequence[int]
) -> None:
    socket.send_fds(connection, [msgspec.msgpack.encode((number, request))], files)


def send_answer(connection: socket.socket, number: int, answer: Answer) -> None:
    connection.send(msgspec.msgpack.encode((number, answer)))


def receive_request(connection: socket.socket) -> Received | None:
    """Return the next request; None when the other side has gone."""
    packet, files, _, _ = socket.recv_fds(
        connection, MAX_PACKET_BYTES, FILES_PER_RANK, socket.MSG_CMSG_CLOEXEC
    )
    return Received(*_requests.decode(packet), files) if packet else None


def receive_answer(connection: socket.socket, number: int) -> Answer | None:
    """Return the answer to a request; None when the other side has gone."""
    while packet := connection.recv(MAX_PACKET_BYTES):
        found, answer = _answers.decode(packet)
        if found == number:
            return answer
    return None

"""A rank's three pipes, as the launcher holds them: output, errors, exit status."""

import os
from contextlib import suppress

from msgspec import Struct

# More than a pipe holds, so that one read takes all that an ended process has left in it.
_READ_BYTES = 2**20


class OutputLine(Struct, frozen=True):
    """A line that a rank has written, as ``on_line`` of ``Cluster.start`` is given it.

    Attributes:
        rank: who wrote it.
        text: the line, without its end.
        is_error: whether it was written to stderr.
    """

    rank: int
    text: str
    is_error: bool


class LinePipe:
    """The reading end of a pipe, by whole lines."""

    def __init__(self, fd: int, *, rank: int, is_error: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._rank, self._is_error = rank, is_error
        self._begun = b""
        self.ended = False  # whether the writing end is closed

    def read(self, *, last: bool = False) -> list[OutputLine]:
        """Return the lines that are there; with ``last``, also one that lacks its end."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.fd, _READ_BYTES)
            self.ended = not data
        *whole, self._begun = (self._begun + data).split(b"\n")
        if last and self._begun:
            whole.append(self._begun)
        return [
            OutputLine(self._rank, text.decode(errors="replace"), self._is_error) for text in whole
        ]


class RankPipes:
    """The pipes of one rank; ``theirs`` go to the fabric and are then closed here."""

    def __init__(self, rank: int) -> None:
        pairs = [os.pipe() for _ in range(3)]
        output, errors, self.exit_fd = (reading for reading, _ in pairs)
        self.theirs = [writing for _, writing in pairs]
        self.rank = rank
        self.lines = (
            LinePipe(output, rank=rank, is_error=False),
            LinePipe(errors, rank=rank, is_error=True),
        )

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        for fd in (*(pipe.fd for pipe in self.lines), self.exit_fd):
            os.close(fd)

    def exit_status(self) -> int | None:
        """Return the rank's exit status; None where the fabric has ended without telling."""
        told = os.read(self.exit_fd, 16)
        return int(told) if told else None

"""What rank 0 decides, heard by all ranks after the same pass, also where hosts run ahead.

Rank 0 announces before its part of a pass what holds after that pass. On the CPU nobody can end the
pass without rank 0, so everybody finds the announcement (noticeboard.py). The host of an
accelerator ends its part of a pass as soon as all is queued there, whatever rank 0 does, and may be
passes ahead. So there an announcement holds some passes later, and whoever says something that rank
0 may answer, or looks for the answer, first waits until its accelerator has done the pass that many
before. That took rank 0's part: so whatever rank 0 makes of what is said holds after a pass that is
still to come here, and what holds after this one has been announced. A host that is no further
ahead than that waits for nothing, and others are held back only while an answer is to come.
"""

from collections import deque

import torch

from gradweave._src.clocks import Clock
from gradweave._src.runtime.driving.noticeboard import Noticeboard

# How many passes a host may be ahead of its accelerator without waiting here.
PASSES_AHEAD = 2


class Announcements:
    """Rank 0's announcements; made on every rank, and told of every pass by ``pass_over``."""

    def __init__(self, board: Noticeboard, clock: Clock, device: torch.device) -> None:
        self.board, self.passes = board, 0
        self.lead = 0 if device.type == "cpu" else PASSES_AHEAD
        self._clock = clock
        self._ends: deque[object] = deque(maxlen=self.lead + 1)  # marks of the last passes' ends
        self._own: dict[int, str] = {}  # on rank 0: what it has announced, by pass
        self._asked_after = 0  # on others: the pass for which the store was asked last
        self._heard: str | None = None  # and its answer

    def pass_over(self) -> None:
        self.passes += 1
        if self.lead and self.board.rank:
            self._ends.append(self._clock.mark())

    @property
    def heard_after(self) -> int:
        """The pass after which ranks hear what is announced now."""
        return self.passes + 1 + self.lead

    def report(self, topic: str, text: str, *, must_be_heard: bool) -> None:
        """Report this rank's part, which rank 0 may answer by an announcement."""
        self._catch_up()
        self.board.report(topic, text, must_be_heard=must_be_heard)

    def announce(self, text: str) -> None:
        """Announce a text; rank 0 does so when all have said what they have to say."""
        after_pass = self.heard_after
        self.board.announce(after_pass, text)
        self._own[after_pass] = text

    def heard(self) -> str | None:
        """Return the announcement that takes effect after the last pass, or None.

        The store is asked once for each pass: as soon as this rank has said what it makes of the
        answer, rank 0 may announce the next and delete this one.
        """
        if self.board.rank == 0:
            return self._own.pop(self.passes, None)
        if self._asked_after != self.passes:
            self._catch_up()
            self._heard = self.board.announced(self.passes)
            self._asked_after = self.passes
        return self._heard

    def _catch_up(self) -> None:
        """Wait until the host is no further ahead of its accelerator than announcements are."""
        if self.board.rank == 0 or len(self._ends) <= self.lead:
            return
        if not self._clock.has_passed(self._ends[0]):
            self._clock.wait_until(self._ends[0])

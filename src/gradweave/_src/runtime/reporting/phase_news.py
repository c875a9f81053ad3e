"""What ranks tell each other of how long their phases take.

They do so now and then, through the store and without waiting for anybody, so that one rank can say
by itself who is slow; and all together when all are asked.
"""

from collections.abc import Callable, Sequence
from socket import gethostname
from time import monotonic

import msgspec
import torch.distributed as dist
from msgspec import Struct

from gradweave._src.comm.small_messages import gather_long_text
from gradweave._src.errors import RequestError
from gradweave._src.phases import Phases
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.reporting.step_clock import StepClock
from gradweave._src.session.slow_ranks import LEAST_TIMED_STEPS, Typical, typical

# Taking medians costs half a millisecond, which is nothing once in so many steps and seconds.
TOLD_EVERY_STEPS, TOLD_EVERY_S = 50, 2.0
TOPIC = "phases"


class RankNews(Struct, frozen=True, kw_only=True):
    """One rank's phases, as far as it has seen whole steps."""

    host: str
    steps: int
    typical: Typical | None  # None: too few steps


def news_of(steps: Sequence[Phases]) -> RankNews:
    return RankNews(host=gethostname(), steps=len(steps), typical=typical(steps))


def gather_news(group: dist.ProcessGroup, own: RankNews) -> list[RankNews]:
    """Return what every rank says; call it on every rank."""
    text = msgspec.json.encode(own).decode()
    texts = gather_long_text(group, text)
    return [msgspec.json.decode(text, type=RankNews) for text in texts]


def known_typical(everyone: Sequence[RankNews]) -> list[Typical]:
    """Return all ranks' typical phases; RequestError on all of them if one has seen too little."""
    found = [news.typical for news in everyone if news.typical is not None]
    if len(found) < len(everyone):
        rank = min(range(len(everyone)), key=lambda one: everyone[one].steps)
        raise RequestError(
            f"{LEAST_TIMED_STEPS} steps since planning last changed something are needed to tell "
            f"who is slow, and rank {rank} has timed {everyone[rank].steps}; ask again later "
            "(steps of compiled wrappers are not timed)"
        )
    return found


class PhaseNews:
    """This rank's news, told in the background of its training, and what others have told."""

    def __init__(
        self, board: Noticeboard, clock: StepClock, *, now_s: Callable[[], float] = monotonic
    ) -> None:
        self.told_at = 0  # at so many forward passes
        self._board, self._clock, self._now_s = board, clock, now_s
        self._next_at, self._next_s = TOLD_EVERY_STEPS, 0.0
        self._is_heard = True

    def forward_begins(self) -> None:
        """Begin a pass; nearly always there is nothing to tell, and that is all."""
        if self._clock.begun >= self._next_at:
            self._next_at = self._clock.begun + TOLD_EVERY_STEPS
            self._tell()

    def heard(self) -> list[RankNews] | None:
        """Return what all ranks have told last; None while some have not."""
        try:
            texts = self._board.everyone(TOPIC)
        except (RuntimeError, OSError):  # of the store
            return None
        if texts is None:
            return None
        return [msgspec.json.decode(text, type=RankNews) for text in texts]

    def _tell(self) -> None:
        now_s = self._now_s()
        if now_s < self._next_s or not self._is_heard:
            return
        self._next_s = now_s + TOLD_EVERY_S
        news = news_of(self._clock.phases())
        if news.typical is None:
            return
        try:
            self._board.say(TOPIC, msgspec.json.encode(news).decode())
        except (RuntimeError, OSError):  # the store is gone, and training goes on
            self._is_heard = False
        self.told_at = self._clock.begun

"""What ranks tell each other of their phases: now and then, without waiting, and all when asked."""

import pytest
from ranks import on_threads

from gradweave._src.comm.groups import common_place
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import RequestError
from gradweave._src.phases import Phases
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.reporting.phase_news import (
    TOLD_EVERY_S,
    TOLD_EVERY_STEPS,
    PhaseNews,
    gather_news,
    known_typical,
    news_of,
)
from gradweave._src.session.slow_ranks import LEAST_TIMED_STEPS, typical

STEP = Phases(input_s=1.0, forward_s=2.0, backward_s=3.0, network_s=4.0)


class Clock:
    """A step clock that a test sets."""

    def __init__(self, steps=LEAST_TIMED_STEPS):
        self.begun, self.steps = 0, steps

    def phases(self):
        return [STEP] * self.steps


class Board:
    """Counts what is said; the store may be gone."""

    def __init__(self, *, is_gone=False):
        self.said, self.is_gone = [], is_gone

    def say(self, topic, text):
        self.said.append((topic, text))
        if self.is_gone:
            raise RuntimeError("the store is gone")

    def everyone(self, topic):
        raise RuntimeError("the store is gone")


class Steps:
    def __init__(self, board, clock):
        self.now_s, self.clock = 0.0, clock
        self.news = PhaseNews(board, clock, now_s=lambda: self.now_s)

    def take(self, count, *, step_s=1.0):
        for _ in range(count):
            self.now_s += step_s
            self.clock.begun += 1
            self.news.forward_begins()


def test_it_is_told_now_and_then():
    board = Board()
    steps = Steps(board, Clock())
    steps.take(TOLD_EVERY_STEPS - 1)
    assert board.said == []
    steps.take(1)
    assert len(board.said) == 1
    assert steps.news.told_at == TOLD_EVERY_STEPS
    steps.take(10 * TOLD_EVERY_STEPS)
    assert len(board.said) == 11


def test_short_steps_are_not_told_more_often():
    board = Board()
    steps = Steps(board, Clock())
    per_second = 1000
    steps.take(10 * per_second, step_s=1 / per_second)
    assert 1 < len(board.said) <= 1 + 10 / TOLD_EVERY_S


def test_nothing_is_told_of_too_few_steps():
    board = Board()
    Steps(board, Clock(steps=LEAST_TIMED_STEPS - 1)).take(3 * TOLD_EVERY_STEPS)
    assert board.said == []


def test_without_a_store_training_goes_on():
    board = Board(is_gone=True)
    steps = Steps(board, Clock())
    steps.take(5 * TOLD_EVERY_STEPS)
    assert len(board.said) == 1
    assert steps.news.heard() is None


def heard(group):
    clock = Clock()
    board = Noticeboard(group, common_place(group, cloned_store(group)))
    news = PhaseNews(board, clock)
    before = news.heard()
    group.barrier().wait()
    clock.begun = TOLD_EVERY_STEPS
    news.forward_begins()
    group.barrier().wait()
    return before, news.heard()


def test_everybody_hears_everybody():
    for before, after in on_threads(3, heard):
        assert before is None
        assert [one.typical for one in after] == [typical([STEP] * LEAST_TIMED_STEPS)] * 3


def asked(group):
    steps = LEAST_TIMED_STEPS if group.rank() != 1 else 7
    everyone = gather_news(group, news_of([STEP] * steps))
    with pytest.raises(RequestError) as refused:
        known_typical(everyone)
    return str(refused.value)


def test_one_that_has_seen_too_little_is_named_on_all_ranks():
    for said in on_threads(3, asked):
        assert said.startswith("20 steps since planning last changed something are needed to tell")
        assert "and rank 1 has timed 7; ask again later" in said

"""What ranks tell each other without waiting: announcements, and turns that all take or none."""

from threading import Event, Timer

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_threads

from gradweave._src.comm.groups import common_place
from gradweave._src.comm.stores import cloned_store
from gradweave._src.runtime.driving.announcements import Announcements
from gradweave._src.runtime.driving.noticeboard import Ended, Noticeboard


def board_of(group):
    return Noticeboard(group, common_place(group, cloned_store(group)))


def said(group):
    board = board_of(group)
    before = board.everyone("topic")
    board.say("topic", f"rank {group.rank()}")
    if group.rank() == 0:
        board.announce(3, "from three on")
    group.barrier().wait()
    return before, board.everyone("topic"), [board.announced(step) for step in (2, 3, 4)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_everybody_reads_what_everybody_has_said(world):
    expected = ([f"rank {rank}" for rank in range(world)], [None, "from three on", None])
    for before, *after in on_threads(world, said):
        assert before is None or before == expected[0]  # others may be faster
        assert tuple(after) == expected


def two_boards(group):
    """Of two wrappers on one group, or of a job that was restarted on the same store."""
    first, second = board_of(group), board_of(group)
    first.say("topic", "first")
    group.barrier().wait()
    return second.everyone("topic"), first.everyone("topic")


def test_boards_do_not_mix():
    assert on_threads(2, two_boards) == [(None, ["first"] * 2)] * 2


def turns_taken(group, most, ends_after):
    """How many turns this rank takes; it wants to end after so many."""
    turns = board_of(group).turns("test")
    for taken in range(most):
        if taken == ends_after[group.rank()]:
            turns.end()
        try:
            turns.take()
        except Ended:
            return taken
    return most


@settings(max_examples=20)
@given(ends_after=st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_all_ranks_take_a_turn_or_none(ends_after):
    """The first that wants to end ends it for all: nobody sends to somebody who is gone."""
    taken = on_threads(3, turns_taken, 4, ends_after)
    assert set(taken) == {min(4, *ends_after)}


def waits_for_nobody(group, rank_that_waits):
    """A rank whose peers never come to take their turn can be ended from another thread."""
    turns = board_of(group).turns("test")
    if group.rank() != rank_that_waits:
        return "elsewhere"

    Timer(0.05, turns.end).start()
    try:
        turns.take()
    except Ended:
        return "ended"
    return "went on"


@pytest.mark.parametrize("rank_that_waits", [0, 1])
def test_waiting_can_be_ended_where_nobody_else_comes(rank_that_waits):
    """About a second where rank 0, who decides, does not answer."""
    found = on_threads(2, waits_for_nobody, rank_that_waits)
    assert found[rank_that_waits] == "ended"
    assert found[1 - rank_that_waits] == "elsewhere"


def late_rank_0(group):
    """Rank 1 arrives, wants to leave, gets no answer and goes; then rank 0 comes."""
    turns = board_of(group).turns("test")
    if group.rank() == 0:
        group.barrier().wait()
    else:
        Timer(0.05, turns.end).start()
    try:
        turns.take()
        found = "went on"
    except Ended:
        found = "ended"
    if group.rank() == 1:
        group.barrier().wait()
    return found


def test_nobody_goes_on_when_somebody_has_left():
    assert on_threads(2, late_rank_0) == ["ended", "ended"]


def asked_twice(group):
    """After one pass, as probing asks and then the driver, when rank 0 has announced more."""
    announcements = Announcements(board_of(group), None, torch.device("cpu"))
    if group.rank() == 0:
        announcements.announce("of pass 1")
    group.barrier().wait()
    announcements.pass_over()
    first = announcements.heard()
    group.barrier().wait()
    if group.rank() == 0:
        announcements.announce("of pass 2")
    group.barrier().wait()
    again = announcements.heard()
    announcements.pass_over()
    return first, again, announcements.heard()


def test_what_was_heard_after_a_pass_holds_until_the_next():
    """It may be gone from the store: who asked for it again waited, while rank 0 waited for it."""
    _, *others = on_threads(3, asked_twice)
    assert others == [("of pass 1", "of pass 1", "of pass 2")] * 2


def forgotten(group):
    board = board_of(group)
    for number in range(3):
        board.say(f"topic {number}", "x")
        group.barrier().wait()
        board.forget(f"topic {number}")
        if group.rank() == 0:
            board.announce(number, "y")
        group.barrier().wait()
    return [board.announced(number) for number in range(3)], board.everyone("topic 0")


class Silent:
    """The store of a rank that is cut off: torch waits for its answers for ever."""

    def check(self, keys):
        Event().wait()


def cut_off(group):
    board = board_of(group)
    board._store, board._answered_within_s = Silent(), 0.05
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            board.everyone("topic")
        said.append(str(caught.value))
    return said


def test_a_store_that_is_silent_is_asked_once():
    expected = ["no answer within 0.05 s", "the store has not answered before"]
    assert on_threads(2, cut_off) == [expected] * 2


def test_what_all_have_heard_does_not_pile_up():
    assert on_threads(2, forgotten) == [([None, None, "y"], None)] * 2

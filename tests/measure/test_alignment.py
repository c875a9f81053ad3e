"""Clocks that are wrong by a known amount are found to be wrong by that amount."""

import time

import pytest
import torch
from ranks import on_threads

from gradweave._src.clocks import HostClock
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.link_bursts import MESSAGES, link_transfers
from gradweave._src.measure.network import _half_round_trip_s
from gradweave._src.measure.spans import SpanRecorder, aligned_timelines

OFFSETS_S = [0.0, 1000.0, -250.0]


def offset(group):
    wrong_s = OFFSETS_S[group.rank()]
    return clock_offset_s(group, now_s=lambda: time.perf_counter() + wrong_s)


def test_offsets_between_ranks():
    for found, injected in zip(on_threads(3, offset), OFFSETS_S, strict=True):
        assert found == pytest.approx(-injected, abs=0.1)


def bursts(group):
    link_transfers(group, ["a", "b", "c"])


def round_trip(group):
    _half_round_trip_s(group, (0, 1), 8, torch.device("cpu"))


def beside_the_users(group, measure):
    """What ranks 1 and 2 receive of rank 0, who sends it after all of ours."""
    received = torch.zeros(MESSAGES, dtype=torch.float64)
    tags = range(MESSAGES)
    posted = [group.recv([received[tag : tag + 1]], 0, tag) for tag in tags if group.rank()]
    measure(group)
    for tag in tags:
        for rank in (1, 2):
            if group.rank() == 0:
                group.send([torch.tensor([tag + 42.0], dtype=torch.float64)], rank, tag).wait()
    for receive in posted:
        receive.wait()
    return received.tolist()


@pytest.mark.parametrize("measure", [offset, bursts, round_trip])
def test_messages_of_ours_are_not_taken_for_the_users(measure):
    of_user = [tag + 42.0 for tag in range(MESSAGES)]
    assert on_threads(3, beside_the_users, measure)[1:] == [of_user] * 2


def aligned(group):
    """Rank r begins r seconds later, by clocks that are wrong."""
    wrong_s = OFFSETS_S[group.rank()]
    moments = iter([wrong_s + group.rank() + moment for moment in (0.0, 0.0, 1.0, 3.0)])
    recorder = SpanRecorder({}, clock=HostClock(moments.__next__))
    recorder.begin()
    recorder.backward()
    recorder.ready()
    return aligned_timelines(recorder, group, -wrong_s)


def test_timelines_on_one_clock():
    results = on_threads(3, aligned)
    assert results[0] == results[1] == results[2]
    for rank, timeline in enumerate(results[0]):
        forward, backward = timeline.spans
        assert forward.start_s == pytest.approx(rank)
        assert (backward.start_s, backward.end_s) == pytest.approx((rank + 1.0, rank + 3.0))

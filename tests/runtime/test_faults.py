"""Ranks that die, stall or fail: the others end soon, and say who was where."""

import re
import signal
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from commands import WarmPython, place_of, world_of

FAULTY = Path(__file__).with_name("faulty.py")
MOST_S = 60


def failed(exit_code):
    """By the exception, or by gloo's threads that abort while the interpreter ends after it."""
    return exit_code in {1, -signal.SIGABRT}


def ended(kind, way, folder, *, keep_going=True):
    """Every rank of two by itself: how it ended, and what it wrote."""
    world = world_of(2)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                WarmPython([FAULTY, kind, way, folder / "arrived"], {**world, **place_of(rank)})
            )
            for rank in range(2)
        ]
        waiting = list(ranks)
        while waiting:
            gone = wait(waiting, MOST_S)
            assert gone, [rank.said() for rank in ranks]
            waiting = [rank for rank in waiting if rank not in gone]
            if not keep_going and any(rank.exit_code() != 0 for rank in gone):
                for rank in waiting:
                    rank.end(signal.SIGKILL)
        return [rank.exit_code() for rank in ranks], ["\n".join(rank.said()) for rank in ranks]


# Without a hook nobody of ours sees buckets.
WHERE = {
    "plain": "rank 0, step 5: the backward pass failed",
    "native": "rank 0, step 5, bucket 2 by native:",
    "ring": "rank 0, step 5, bucket 2 by ring:",
}


@pytest.mark.parametrize("way", ["plain", "ring", pytest.param("native", marks=pytest.mark.long)])
def test_a_killed_rank(way, tmp_path):
    codes, said = ended("killed", way, tmp_path)
    assert failed(codes[0])
    assert codes[1] == -signal.SIGKILL
    assert said[0].count(WHERE["plain"]) == (way == "plain")
    assert WHERE[way] in said[0]
    assert "trained to the end" not in said[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "said_of_it"),
    [
        ("ddp", "rank 1, step 5: the forward pass failed outside of the model"),
        # What rank 0 owes of step 4 may have left it, or not.
        ("sharded", r"rank 1, step (5, buffers|4, bucket 1 of 1): "),
    ],
)
def test_a_rank_that_is_gone_when_its_buffers_are_wanted(way, said_of_it, tmp_path):
    """What hosts the store is gone as well."""
    codes, said = ended("gone", way, tmp_path)
    assert codes[0] == -signal.SIGKILL
    assert failed(codes[1])
    assert re.search(said_of_it, said[1])


@pytest.mark.parametrize(
    "way", ["ring", *(pytest.param(one, marks=pytest.mark.long) for one in ("plain", "native"))]
)
def test_a_stalled_rank(way, tmp_path):
    """Four seconds, a time-out. The first rank to fail ends the other."""
    codes, said = ended("stalled", way, tmp_path, keep_going=False)
    assert failed(codes[0])
    assert WHERE[way] in said[0]


@pytest.mark.long
def test_a_hook_that_raises_on_one_rank(tmp_path):
    """Seconds: the other rank waits for it until its time-out."""
    codes, said = ended("hook", "plain", tmp_path)
    assert failed(codes[0])
    assert failed(codes[1])
    assert "the hook of rank 1 has failed" in said[1]
    assert "trained to the end" not in said[0] + said[1]

"""Ranks that die, stall or fail: the others end soon, and say who was where."""

import re
import signal
import sys
from pathlib import Path

import pytest

from gradweave._src.lab import Cluster, ClusterSpec

FAULTY = str(Path(__file__).parent / "faulty.py")
MOST_S = 60


def failed(exit_code):
    """By the exception, or by gloo's threads that abort while the interpreter ends after it."""
    return exit_code in {1, 128 + signal.SIGABRT}


def ended(kind, way="plain", *, keep_going=True):
    """Every rank of two by itself: how it ended, and what it wrote last."""
    lines = []
    with Cluster(ClusterSpec(nodes=2), loopback=True) as cluster:
        job = cluster.start(
            [sys.executable, FAULTY, kind, way], on_line=lines.append, keep_going=keep_going
        )
        result = job.wait(timeout_s=MOST_S)
    said = {rank: "\n".join(line.text for line in lines if line.rank == rank) for rank in (0, 1)}
    return [found.exit_code for found in result.exits], said


# Without a hook nobody of ours sees buckets.
WHERE = {
    "plain": "rank 0, step 5: the backward pass failed",
    "native": "rank 0, step 5, bucket 2 by native:",
    "ring": "rank 0, step 5, bucket 2 by ring:",
}


@pytest.mark.long
@pytest.mark.parametrize("way", WHERE)
def test_a_killed_rank(way):
    """Seconds: ranks import torch."""
    codes, said = ended("killed", way)
    assert failed(codes[0])
    assert codes[1] == 128 + signal.SIGKILL
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
def test_a_rank_that_is_gone_when_its_buffers_are_wanted(way, said_of_it):
    """Seconds: ranks import torch. What hosts the store is gone as well."""
    codes, said = ended("gone", way)
    assert codes[0] == 128 + signal.SIGKILL
    assert failed(codes[1])
    assert re.search(said_of_it, said[1])


@pytest.mark.long
@pytest.mark.parametrize("way", WHERE)
def test_a_stalled_rank(way):
    """Seconds: a time-out. The first rank to fail ends the other."""
    codes, said = ended("stalled", way, keep_going=False)
    assert failed(codes[0])
    assert WHERE[way] in said[0]


@pytest.mark.long
def test_a_hook_that_raises_on_one_rank():
    """Seconds: the other rank waits for it until its time-out."""
    codes, said = ended("hook")
    assert failed(codes[0])
    assert failed(codes[1])
    assert "the hook of rank 1 has failed" in said[1]
    assert "trained to the end" not in said[0] + said[1]

"""Small messages leave nothing behind."""

import sys

import pytest
import torch
from ranks import on_processes

from gradweave._src.comm.small_messages import (
    broadcast_text,
    gather_long_text,
    gather_text,
    largest,
)
from gradweave._src.torch_internals import wait_until_let_go

CPU = torch.device("cpu")


def _said(group):
    text = f"rank {group.rank()}"
    return [
        gather_text(group, text),
        gather_long_text(group, text * 100),
        broadcast_text(group, text),
        largest(group, [1.0, float(group.rank())]),
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_ranks_say(world, tmp_path):
    texts = [f"rank {rank}" for rank in range(world)]
    expected = [
        texts,
        [text * 100 for text in texts],
        "rank 0",
        [1.0, world - 1.0],
    ]
    assert on_processes(world, _said, scratch=tmp_path) == [expected] * world


def _held_by_others(group):
    """How many messages are held by others when they are said to be over."""
    held = 0
    for _ in range(500):
        message = torch.zeros(10)
        references = sys.getrefcount(message)
        wait_until_let_go(lambda message=message: group.broadcast([message]), [message])
        held += message._use_count() > 1 or sys.getrefcount(message) > references
    return held


def test_nobody_holds_messages_that_are_over(tmp_path):
    """Otherwise gloo's threads need Python's lock for them, where a script may have ended."""
    assert on_processes(2, _held_by_others, scratch=tmp_path) == [0, 0]

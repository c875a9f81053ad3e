"""Sents that take turns on several threads end as if they had followed each other."""

from contextlib import closing
from functools import cache

import pytest
import torch
from ranks import on_threads

from gradweave._src.collectives.schedule import block_edges
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.lanes import LANES, Lanes, Sent
from gradweave._src.device_order import Order
from gradweave._src.errors import CollectiveError

# Large and small ones in turn; blocks of unequal sizes, and none for some ranks.
SIZES = (260_000, 3, 1_000_001, 1, 260_007, 1024, 2)


@cache  # what all ranks look at, and none may change
def whole_numbers(elements, rank):
    generator = torch.Generator().manual_seed(1000 * rank + elements)
    return torch.randint(-9, 10, (elements,), generator=generator).float()


@cache
def total(elements, world):
    return sum(whole_numbers(elements, rank) for rank in range(world))


def with_lanes(*groups_and_rest):
    groups, (fn, *args) = groups_and_rest[:LANES], groups_and_rest[LANES:]
    with closing(Lanes([Communicator(group) for group in groups])) as lanes:
        return fn(groups[0], lanes, *args)


def summed_and_gathered(group, lanes, collective):
    """Both halves of an all-reduce for each size, all on their way at once."""
    ranks = range(group.size())
    messages = [whole_numbers(elements, group.rank()).clone() for elements in SIZES]
    ended = []

    def on_begin():
        return lambda: ended.append(operation)

    for operation in ("reduce-scatter", "all-gather"):
        sent = [
            lanes.submit(operation, message, collective=collective, on_begin=on_begin)
            for message in messages
        ]
        for done in sent:
            Sent(done, "here", Order.MODULE_AFTER_PARAMETERS).wait()
        if operation == "reduce-scatter":
            for message in messages:  # what is not this rank's must come from the others
                first, last = block_edges(len(message), len(ranks))[group.rank() :][:2].tolist()
                message[:first] = message[last:] = float("nan")
    expected = [total(elements, len(ranks)) for elements in SIZES]
    right = [torch.equal(*pair) for pair in zip(messages, expected, strict=True)]
    return all(right), len(ended)


@pytest.mark.parametrize("collective", ["ring", "halving-doubling", "native"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.long)])
def test_halves_make_up_the_whole(world, collective):
    found = on_threads(world, with_lanes, summed_and_gathered, collective, groups=LANES)
    assert found == [(True, 2 * len(SIZES))] * world


def unequal(group, lanes):
    """Ranks that send different messages are told so."""
    message = torch.zeros(1024 + group.rank())
    done = lanes.submit("all-gather", message, collective="ring")
    sent = Sent(done, "bucket 7", Order.MODULE_AFTER_PARAMETERS)
    with pytest.raises(CollectiveError, match=r"^bucket 7: ") as caught:
        sent.wait()
    return str(caught.value)


def test_a_failure_says_which_message():
    for complaint in on_threads(2, with_lanes, unequal, groups=LANES):
        assert "elements" in complaint


class Noting:
    """Stands in for a communicator: notes what it is to run, and fails where it is told to."""

    def __init__(self, lane, log):
        self.lane, self.log = lane, log

    def run(self, operation, message, *, collective, root):
        self.log.append((self.lane, len(message)))
        if collective == "broken":
            raise CollectiveError("broken here")


def test_messages_take_turns_and_a_failure_stays_on_its_thread():
    log = []
    lanes = Lanes([Noting(lane, log) for lane in range(LANES)])
    sent = [
        lanes.submit(
            "all-gather", torch.zeros(size), collective="broken" if size == LANES else "ring"
        )
        for size in range(3 * LANES)
    ]
    lanes.drain(10.0)
    assert all(done.done() for done in sent)
    lanes.close()
    failed = [size for size, done in enumerate(sent) if _failed(done)]
    # The first lane's second message breaks it.
    assert failed == [LANES, 2 * LANES]
    assert sorted(log) == sorted((n % LANES, n) for n in range(3 * LANES) if n != 2 * LANES)


def _failed(done):
    try:
        done.wait()
    except CollectiveError as error:
        return "broken here" in str(error)
    return False

"""The executor with payloads of the caller's: what is posted when, and what is done on arrival."""

from dataclasses import dataclass, replace

import pytest
import torch
from ranks import on_processes, on_threads

from gradweave._src.collectives import binomial, bruck, doubling, ring
from gradweave._src.collectives.program import Kind, program
from gradweave._src.comm.channel import MESSAGES, Call
from gradweave._src.comm.execute import MOST_AT_ONCE, POSTED_AHEAD, execute
from gradweave._src.comm.rounds import execute_by_rounds
from gradweave._src.comm.slices import Scratch, cut
from gradweave._src.comm.small_messages import FIRST_TAG

SCHEDULES = [bruck.all_gather, binomial.all_reduce, doubling.all_reduce, ring.all_reduce]


class Contributors:
    """Who is in each block, one bit per rank: an arrival that is neither a sum nor a copy."""

    copied = True

    def __init__(self, steps, rank):
        self.steps = steps.steps
        self.blocks = torch.full((steps.blocks,), 1 << rank)
        self.events = []

    def outgoing(self, place):
        self.events.append("pack")
        step = self.steps[place]
        return self.blocks[step.first : step.last].clone()

    def room(self, place):
        self.events.append("post")
        step = self.steps[place]
        return torch.empty(step.last - step.first, dtype=torch.int64)

    def arrived(self, place, message):
        self.events.append("merge")
        step = self.steps[place]
        if step.kind is Kind.ADD:
            message = message | self.blocks[step.first : step.last]
        self.blocks[step.first : step.last] = message

    def finish(self):
        """Nothing is left to do."""


def merged(group, run):
    found = []
    for number, make in enumerate(SCHEDULES):
        steps = program(make(group.size()), group.rank())
        payload = Contributors(steps, group.rank())
        run(steps, payload, Call(group, "merging", "merging", number))
        found.append(payload.blocks.tolist())
    return found


def overlapping(steps, payload, call):
    execute(steps, [payload], call)


def expected(ranks):
    everyone = (1 << ranks) - 1
    gathered = [1 << rank for rank in range(ranks)]
    return [gathered, [everyone], [everyone], [everyone] * ranks]


@pytest.mark.parametrize("world", range(1, 7))
def test_what_is_done_on_arrival_is_the_callers(world):
    assert on_threads(world, merged, overlapping) == [expected(world)] * world


@pytest.mark.parametrize("world", [2, 5])
def test_by_rounds_it_is_the_same(world, tmp_path):
    results = on_processes(world, merged, execute_by_rounds, scratch=tmp_path)
    assert results == [expected(world)] * world


# What is asked of the backend, and when: a group that moves nothing, and lists what it is asked.


@dataclass(frozen=True)
class Asked:
    """One point-to-point operation; ``over``: it has been waited for."""

    what: str
    peer: int
    tag: int
    memory: range
    over: bool = False


class Listing:
    def __init__(self, rank):
        self._rank, self.asked = rank, []

    def rank(self):
        return self._rank

    def send(self, tensors, peer, tag):
        return self._ask("send", tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._ask("receive", tensors, peer, tag)

    def _ask(self, what, tensors, peer, tag):
        begin = tensors[0].data_ptr()
        operation = Asked(what, peer, tag, range(begin, begin + tensors[0].nbytes))
        self.asked.append(operation)
        return Work(self.asked, operation)


class Work:
    def __init__(self, asked, operation):
        self._asked, self._operation = asked, operation

    def wait(self):
        self._asked.append(replace(self._operation, over=True))


def listed(steps, rank, payloads):
    group = Listing(rank)
    execute(steps, payloads, Call(group, "listing", "listing", 0), count=len(payloads))
    return group.asked


def listed_for_slices(make, rank, *, ranks, slices):
    steps = program(make(ranks), rank)
    message = torch.zeros(ranks * slices * 3)
    return listed(steps, rank, list(cut(message, steps, scratch=Scratch(), slices=slices)))


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_copied_messages_wait_for_nothing_but_what_they_need(make, ranks):
    """All receives are posted before anything is packed; sends are waited for in the end."""
    for rank in range(ranks):
        steps = program(make(ranks), rank)
        payload = Contributors(steps, rank)
        asked = listed(steps, rank, [payload])
        receives = len(steps.receives)
        sends = len(steps.steps) - receives
        assert payload.events[:receives] == ["post"] * receives
        assert "post" not in payload.events[receives:]
        waited = [one.what for one in asked if one.over]
        assert waited == ["receive"] * receives + ["send"] * sends


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("slices", [1, 3, MOST_AT_ONCE + 2])
def test_what_is_still_leaving_is_not_received_over(make, ranks, slices):
    """And no more than a few receives are ahead of what is waited for."""
    for rank in range(ranks):
        leaving, arriving = set(), set()
        for one in listed_for_slices(make, rank, ranks=ranks, slices=slices):
            open_ones = leaving if one.what == "send" else arriving
            if one.over:
                open_ones.remove(replace(one, over=False))
                continue
            open_ones.add(one)
            if one.what == "receive":
                assert not any(overlap(one.memory, sent.memory) for sent in leaving)
            assert len(arriving) <= MOST_AT_ONCE * (POSTED_AHEAD + 1)
        assert not leaving
        assert not arriving


def overlap(first, second):
    return max(first.start, second.start) < min(first.stop, second.stop)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_message_has_one_receiver(make, ranks):
    """With its tag and its length: no two messages of a call are taken for each other."""
    sent, received = [], []
    for rank in range(ranks):
        for one in listed_for_slices(make, rank, ranks=ranks, slices=2):
            if not one.over and one.what == "send":
                sent.append((rank, one.peer, one.tag, len(one.memory)))
            elif not one.over:
                received.append((one.peer, rank, one.tag, len(one.memory)))
    assert sorted(sent) == sorted(received)
    assert len({message[:3] for message in sent}) == len(sent)


def test_tags_are_behind_those_of_users_and_of_small_messages():
    """And have 31 bits, which is what gloo sends."""
    beginnings = {Call(None, "sum", "sum of 3", number).salt for number in range(20_000)}
    assert min(beginnings) == FIRST_TAG + MESSAGES
    assert max(beginnings) == (1 << 31) - MESSAGES
    assert all(beginning % MESSAGES == 0 for beginning in beginnings)

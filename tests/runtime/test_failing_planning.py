"""Whatever of planning fails on one rank: all give up at one step, say why, and train on."""

import logging

import pytest
import torch
from ranks import on_processes
from torch import nn

from gradweave import CollectiveError, DistributedDataParallel, ShardedDataParallel
from gradweave._src.clocks import HostClock
from gradweave._src.runtime.driving import activities, instruments, probing
from gradweave._src.runtime.driving.probing import Probing
from gradweave._src.sparse.settings import GTopK

WIDTH = 200  # so that torch's own buckets are far larger than what is probed
MOST_STEPS = 20_000  # threads of a busy machine are late
STEP_S = 10.0  # as planning's clock has it, so that there is time for everything


def fail(*args, **kwargs):
    raise MemoryError("no memory left")


def at_its_beginning(wrapped):
    wrapped._driver._instruments.probing = fail


def in_a_message(wrapped):
    probing.send_in_turn = fail


def between_messages(wrapped):
    """Others have come to the next turn meanwhile."""
    begun, wait = [], Probing._wait_for_forward

    def wait_once(self):
        begun.append(self)
        return fail() if len(begun) > 1 else wait(self)

    Probing._wait_for_forward = wait_once


def in_its_planner(wrapped):
    activities.shortlist = fail


def in_selecting(wrapped):
    instruments.selection_s_per_element = fail


def as_pricing_begins(wrapped):
    """What it says to the others does not fail."""
    instruments = wrapped._driver._instruments
    begin = instruments.pricing
    instruments.pricing = lambda command, *, why_not="": (
        begin(command, why_not=why_not) if why_not else fail()
    )


def given_up(group, kind, options, breaks, broken_rank):
    """What is sent in the end, why, and whether ranks have the same weights then."""
    logging.getLogger("gradweave").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    wrapped = kind(model, record_steps=1, trial_steps=1, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    now_s = [0.0]
    wrapped._driver._now_s = lambda: now_s[0]
    wrapped._driver._instruments.clock = HostClock(lambda: now_s[0])
    if group.rank() == broken_rank:
        breaks(wrapped)
    left = 3
    for step in range(MOST_STEPS):
        if wrapped.findings().stage == "settled":
            left -= 1
        if not left:
            break
        optimizer.zero_grad()
        torch.manual_seed(10 * step + group.rank())
        wrapped(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        now_s[0] += STEP_S
    assert not left, wrapped.explain()
    weights = [value.sum().item() for value in wrapped.state_dict().values()]
    return wrapped.plan, wrapped.findings().note, weights


@pytest.mark.parametrize(
    ("kind", "options", "breaks", "broken_rank"),
    [
        pytest.param(DistributedDataParallel, {}, at_its_beginning, 0, marks=pytest.mark.long),
        (DistributedDataParallel, {}, at_its_beginning, 1),
        (DistributedDataParallel, {}, in_a_message, 1),
        (DistributedDataParallel, {}, between_messages, 1),
        (DistributedDataParallel, {}, in_its_planner, 0),
        pytest.param(ShardedDataParallel, {}, at_its_beginning, 1, marks=pytest.mark.long),
        (ShardedDataParallel, {}, in_a_message, 0),
        pytest.param(ShardedDataParallel, {}, in_its_planner, 0, marks=pytest.mark.long),
        (DistributedDataParallel, {"compression": GTopK(density=0.1)}, in_selecting, 1),
        (DistributedDataParallel, {"compression": GTopK(density=0.1)}, as_pricing_begins, 1),
    ],
)
def test_what_fails_on_one_rank(tmp_path, kind, options, breaks, broken_rank):
    """Long before any time-out."""
    ranks = on_processes(2, given_up, kind, options, breaks, broken_rank, scratch=tmp_path)
    for plan, note, weights in ranks:
        assert plan is None
        assert "no memory left" in note
        assert weights == ranks[0][2]
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1].count("(rank 1)") == broken_rank


def an_answer_lost(group, which):
    """What rank 1 is told whose report was heard, though it does not know that."""
    logging.getLogger("gradweave").setLevel(logging.CRITICAL)
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(4, 4), record_steps=1, trial_steps=1)
    if group.rank() == 1:
        board = wrapped._driver._board
        report, said = board.report, []

        def lose(topic, text, *, must_be_heard):
            report(topic, text, must_be_heard=must_be_heard)
            said.append(topic)
            if len(said) == which:
                raise RuntimeError("the answer is lost")

        board.report = lose
    try:
        for _ in range(MOST_STEPS):
            wrapped(torch.ones(2, 4)).square().mean().backward()
    except (CollectiveError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("which", [1, pytest.param(2, marks=pytest.mark.long)])
def test_whoever_may_have_been_heard_does_not_go_on_alone(tmp_path, which):
    other, (kind, text) = on_processes(2, an_answer_lost, which, scratch=tmp_path)
    assert kind == "CollectiveError"
    assert "other ranks may change their buckets: the answer is lost" in text
    assert other is not None

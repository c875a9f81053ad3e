"""Messages beside the training: within their budget, and nothing is left of them."""

import threading

import pytest
import torch
from ranks import on_processes
from test_course import clock_of
from torch import nn

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src.runtime.driving.probing import Budget
from gradweave._src.session.commands import Probe
from gradweave._src.session.learning import MESSAGES_PER_PROBE, PROBED_BYTES
from gradweave._src.vocabulary import Way

WIDTH = 200  # so that torch's own buckets are far larger than what is probed


def budget(**within):
    """Of a probe of two ways, each of whose sizes is two times MESSAGES_PER_PROBE messages."""
    ways = (Way("reduce-scatter", "native"), Way("all-gather", "native"))
    limits = {"within_s": 10.0, "within_bytes": 10**9, **within}
    return Budget(Probe(ways, (100, 1000), required_sizes=1, **limits))


def test_a_budget_has_a_limit_of_bytes():
    of_one, of_ten = 2 * MESSAGES_PER_PROBE * 100, 2 * MESSAGES_PER_PROBE * 1000
    known = budget(within_bytes=of_one + of_ten)
    known.spend(100, 0.01)
    assert known.sent_bytes == of_one
    assert known.allows([1000])
    assert not known.allows([1000, 100])
    known.spend(1000, 0.01)
    assert known.sent_bytes == of_one + of_ten
    assert not known.allows([100])


def test_a_budget_has_a_limit_of_seconds():
    """Sizes that were not sent yet take longer by their bytes."""
    known = budget(within_s=11.0)
    known.spend(100, 1.0)
    assert known.spent_s == 1.0
    assert known.allows([1000])
    assert not known.allows([1000, 100])
    known.spend(1000, 2.0)
    assert known.allows([1000] * 4)
    assert not known.allows([1000] * 4 + [100])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def probed(group, kind, step_s, options):
    """What was asked to be sent, and which threads there are when planning is over."""
    wrapped = kind(model(), record_steps=1, trial_steps=1, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    clock = clock_of(wrapped)
    asked = []
    instruments = wrapped._driver._instruments
    begin = instruments.probing
    instruments.probing = lambda command, name: asked.append(command) or begin(command, name)
    for step in range(300):
        if wrapped.findings().stage == "settled":
            break
        torch.manual_seed(10 * step + group.rank())
        optimizer.zero_grad()
        wrapped(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        clock.now_s += step_s
    assert wrapped.findings().stage == "settled"
    names = [thread.name for thread in threading.enumerate()]
    known = wrapped._session._known
    return asked, "gradweave probing" in names, known.probed_s, wrapped.findings().elapsed_s


@pytest.mark.parametrize(
    ("kind", "options", "operations"),
    [
        (DistributedDataParallel, {}, {"all-reduce"}),
        (DistributedDataParallel, {"precision": "bf16"}, {"all-reduce"}),
        (ShardedDataParallel, {}, {"reduce-scatter", "all-gather"}),
    ],
    ids=["dense", "rounded", "sharded"],
)
def test_sizes_that_training_does_not_send(tmp_path, kind, options, operations):
    """Steps seem to take ten seconds, so there is time for everything."""
    for asked, is_left, probed_s, elapsed_s in on_processes(
        2, probed, kind, 10.0, options, scratch=tmp_path
    ):
        first = asked[0]
        assert isinstance(first, Probe)
        assert first.sizes_bytes == PROBED_BYTES
        assert {way.operation for way in first.ways} == operations
        assert not is_left
        assert 0 < probed_s <= 0.02 * elapsed_s


def test_nothing_is_sent_that_would_take_too_long(tmp_path):
    """Steps seem to take no time, so two per cent of it are none, either."""
    for asked, is_left, probed_s, _ in on_processes(
        2, probed, DistributedDataParallel, 1e-9, {}, scratch=tmp_path
    ):
        assert (asked, is_left, probed_s) == ([], False, 0.0)

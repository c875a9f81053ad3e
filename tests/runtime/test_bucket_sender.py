"""What a bucket that does not arrive is called in the log."""

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from ranks import on_processes

from gradweave import DistributedDataParallel
from gradweave._src.errors import CollectiveError
from gradweave._src.measure import spans
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.runtime.reducer.transports import BucketSender, send_bucket


class ByRing:
    def name_of(self, bucket):
        return "ring"


def test_the_first_failure_is_told_with_the_trainings_own_step(caplog):
    """Others of the same step fail because of it, and plans come and go with their senders."""
    sender = BucketSender(ByRing(), rank=3, step=lambda: 17)
    failures = [sender.failed(bucket, RuntimeError("gone")) for bucket in (1, 0, 2)]
    assert caplog.messages == ["rank 3, step 17, bucket 2 by ring: gone"]
    assert "bucket 1 by ring" in str(failures[1])
    with pytest.raises(CollectiveError, match="bucket 2 by ring"):
        sender.raise_failure()


def goes_on_after_a_failure(group):
    """What backward and the next forward raise, when the second step's first bucket fails."""
    model = torch.nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model, collective="ring")
    wrapped(torch.ones(1, 3)).sum().backward()
    transport = wrapped._engine.sender.transport

    def fails(*args, **options):
        raise RuntimeError("gone")

    transport.average = fails
    with suppress(Exception):
        wrapped(torch.ones(1, 3)).sum().backward()
    with pytest.raises(CollectiveError) as caught:
        wrapped(torch.ones(1, 3))
    return str(caught.value)


def test_a_failure_that_backward_has_not_raised_is_raised_by_the_next_forward(tmp_path):
    for rank, said in enumerate(on_processes(2, goes_on_after_a_failure, scratch=tmp_path)):
        assert said == f"rank {rank}, step 2, bucket 1 by ring: gone"


class Underway(ByRing):
    """What knows a group; its messages never arrive."""

    def __init__(self):
        self.sent = torch.futures.Future()

    def average(self, gradient, parameters, *, bucket, before):
        return self.sent

    def __call__(self, bucket):
        return self.sent


def bucket_of(parameter):
    message = torch.ones(parameter.numel())
    return SimpleNamespace(index=lambda: 0, parameters=lambda: [parameter], buffer=lambda: message)


def by_our_hook(transport, recorder, bucket):
    send_bucket(BucketSender(transport, rank=0, step=lambda: 1, recorder=recorder), bucket)


def by_the_watching_hook(transport, recorder, bucket):
    spans._send_and_note(spans._HookState(recorder, transport), bucket)


@pytest.mark.parametrize("send", [by_our_hook, by_the_watching_hook])
def test_a_message_that_is_under_way_keeps_no_group(send):
    """gloo's thread would drop it, if everybody else has, and wait for itself: torch aborts."""
    parameter, transport = torch.nn.Parameter(torch.ones(3)), Underway()
    recorder = SpanRecorder({parameter: "weight"})
    send(transport, recorder, bucket_of(parameter))
    sent, known = transport.sent, weakref.ref(transport)
    del transport
    gc.collect()
    assert known() is None
    sent.set_result(torch.ones(3))
    assert recorder.message_count() == 1

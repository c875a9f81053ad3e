"""A plan carried out by torch's own wrapper: its buckets, exactly."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_threads
from strategies import traces
from torch.nn.parallel import DistributedDataParallel

from gradweave import PlanMismatch
from gradweave._src.bench.buckets import bucket_bytes, check_buckets
from gradweave._src.measure.spans import SpanRecorder, watch
from gradweave._src.plan import merge
from gradweave._src.workloads.replay import Replay

BATCH = torch.zeros(1)


class NoTime:
    def now_s(self):
        return 0.0

    def wait_until(self, moment_s):
        pass


def trained(group, trace, plan, watched=None):
    """Three iterations; what torch made of the plan."""
    model = Replay(trace, gradient=group.rank() + 1.0, timer=NoTime())
    bytes_of = {name: p.nbytes for name, p in model.named_parameters()}
    # torch closes a bucket as soon as it holds at least its cap.
    caps_mib = [nbytes / 2**20 for nbytes in bucket_bytes(plan, bytes_of)]
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb_list=caps_mib)
    recorder = SpanRecorder({p: name for name, p in model.named_parameters()})
    if watched:
        watch(wrapped, recorder)
    for _ in range(3):
        model.zero_grad()
        recorder.begin()
        loss = wrapped(BATCH)
        recorder.backward()
        loss.backward()
    check_buckets(wrapped, bucket_bytes(plan, bytes_of))
    for wrong in ([1], [*bucket_bytes(plan, bytes_of), 4]):
        with pytest.raises(PlanMismatch, match="torch made"):
            check_buckets(wrapped, wrong)
    assert all(torch.all(p.grad == 1.5) for p in model.parameters())
    return recorder.timeline() if watched else None


@settings(max_examples=15)
@given(data=st.data())
def test_torch_makes_the_planned_buckets(data):
    trace = data.draw(traces(most=8)).with_bytes_per_element(4)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(trace.tensors) - 1))))
    edges = [0, *sorted(cut for cut in cuts if cut < len(trace.tensors)), len(trace.tensors)]
    lengths = [end - start for start, end in pairwise(edges)]
    plan = merge(trace, lengths, planner="drawn", collective="native")
    on_threads(2, trained, trace, plan)


def test_a_measured_timeline_has_the_plans_buckets(small_trace):
    plan = merge(small_trace, [1, 2], planner="made", collective="native")
    for timeline in on_threads(2, trained, small_trace, plan, "watched"):
        messages = [span for span in timeline.spans if span.lane == "communication"]
        assert [span.tensors for span in messages] == [b.tensors for b in plan.buckets]
        assert [span.nbytes for span in messages] == [400, 1004]
        assert [span.lane for span in timeline.spans[:2]] == ["forward", "backward"]
        assert timeline.spans[1].end_s >= max(span.start_s for span in messages)

"""What profilers see of us: named ranges and named threads, and nothing where there is none."""

import threading

import torch
from ranks import on_processes
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src.plan import Bucket, Plan
from gradweave._src.torch_internals import named_range

NAMES = (("1.bias", "1.weight"), ("0.bias", "0.weight"))
ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def by_ring(passes):
    buckets = tuple(Bucket(tensors=names, collective="ring") for names in NAMES)
    return Plan(planner="made", buckets=buckets, passes=passes)


def trained(wrapper, steps):
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def ranges(make, steps):
    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as seen:
        wrapper = make()
        trained(wrapper, steps)
        if isinstance(wrapper, ShardedDataParallel):
            wrapper.synchronise()
    return {event.name for event in seen.events() if event.name.startswith("gradweave: ")}


def seen(group):
    planning = ranges(lambda: DistributedDataParallel(network(), record_steps=1), 60)
    sent = ranges(lambda: DistributedDataParallel(network(), plan=by_ring("backward")), 3)
    both = ranges(lambda: ShardedDataParallel(network(), plan=by_ring("both")), 3)
    return planning, sent, both


def test_what_we_do_has_names(tmp_path):
    """A second or two: profiled steps."""
    leaving = {"gradweave: bucket 1 leaves", "gradweave: bucket 2 leaves"}
    for planning, sent, both in on_processes(2, seen, scratch=tmp_path):
        assert {"gradweave: planning, recording", "gradweave: other buckets"} <= planning
        assert sent == leaving | {"gradweave: all-reduce of 80 bytes by ring"}
        of_80 = {
            f"gradweave: {kind} of 80 bytes by ring" for kind in ("reduce-scatter", "all-gather")
        }
        assert both >= leaving | of_80


def test_without_a_profiler_nothing_is_done():
    class Unprintable:
        def __str__(self):
            raise AssertionError

    assert named_range("%s", Unprintable()) is named_range("a range")


def running(group):
    before = {thread.ident for thread in threading.enumerate()}
    wrapper = DistributedDataParallel(network(), plan=by_ring("backward"))
    sharded = ShardedDataParallel(network(), plan=by_ring("both"))
    trained(wrapper, 1)
    trained(sharded, 1)
    return [thread.name for thread in threading.enumerate() if thread.ident not in before]


def test_threads_have_names(tmp_path):
    for names in on_processes(2, running, scratch=tmp_path):
        assert set(names) == {"gradweave communication"}

"""What else a wrapper has and keeps: timelines, hooks, copies, its end."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from small_training import QUICK, batch, network, on_two, plan_of, trained

from gradweave.runtime.ddp import DistributedDataParallel


def timelines(group):
    plain = DistributedDataParallel(network(), plan=plan_of(2, 3))
    trained(plain, group.rank(), steps=5)
    noting = DistributedDataParallel(network(), plan=plan_of(2, 3), timeline=True)
    trained(noting, group.rank(), steps=5)
    hooks = (len(plain._comm_hooks), len(noting._comm_hooks))
    return hooks, noting.timeline(), noting.timelines()


def test_timelines_of_all_ranks(tmp_path):
    results = on_two(timelines, scratch=tmp_path)
    for rank, (hooks, own, everyone) in enumerate(results):
        assert hooks == (0, 1)
        assert everyone == results[0][2]
        for timeline in (own, everyone[rank]):
            messages = [span for span in timeline.spans if span.lane == "communication"]
            assert [span.nbytes for span in messages] == [60, 432]
            assert [len(span.tensors) for span in messages] == [2, 3]
    begins = [timeline.spans[0].start_s for timeline in results[0][2]]
    assert min(begins) == pytest.approx(0, abs=1e-9)


def dies(group):
    model = network()
    wrapped = DistributedDataParallel(model, **QUICK)
    trained(wrapped, group.rank(), steps=3)
    gone = weakref.ref(wrapped)
    gc.disable()
    del wrapped
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    threads = [thread.name for thread in threading.enumerate() if "gradweave" in thread.name]
    return gone() is None, sum(hooks), threads


def test_nothing_keeps_the_wrapper_alive(tmp_path):
    """It must die before its process group: a cycle would keep it until who knows when.

    Nor does it leave anything behind, though it dies while it records.
    """
    assert on_two(dies, scratch=tmp_path) == [(True, 0, [])] * 2


class Doubling:
    calls = 0


def doubling(
    state: Doubling, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    state.calls += 1
    done = torch.futures.Future()
    done.set_result(bucket.buffer() * 2)
    return done


def with_a_hook_of_ones_own(group):
    wrapped = DistributedDataParallel(network(), plan=plan_of(2, 3))
    state = Doubling()
    wrapped.register_comm_hook(state, doubling)
    steps = 0
    for steps in range(1, 7):
        wrapped(batch(steps, group.rank())).sum().backward()
    return state.calls >= 2 * (steps - 1)


def test_a_users_hook_stays(tmp_path):
    assert on_two(with_a_hook_of_ones_own, scratch=tmp_path) == [True, True]


def copied(group):
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=2)
    again = pickle.loads(pickle.dumps(wrapped))  # noqa: S301 torch's wrapper can be pickled
    again(batch(1, group.rank())).sum().backward()
    return copy.copy(again.explain())


def test_a_pickled_wrapper_is_torchs(tmp_path):
    assert on_two(copied, scratch=tmp_path) == ["torch's own buckets stay: this is a copy."] * 2

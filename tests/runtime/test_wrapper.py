"""What else a wrapper has and keeps: timelines, hooks, copies, its end."""

import copy
import gc
import os
import pickle
import threading
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import gloo_group, on_processes, on_threads, seeded
from small_training import MOST_STEPS, QUICK, batch, network, on_two, plan_of, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.errors import RequestError
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.reducer.engine import ReducerEngine
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.torch_internals import torch_bucket_bytes


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


def looks_at_the_reducer(group):
    """How often steps ask whether there was another pass; and whether there is always a reducer."""
    early = object.__new__(DistributedDataParallel)
    nn.Module.__init__(early)
    wrapped = DistributedDataParallel(network(), record_steps=30)
    looks, has_reduced = [], ReducerEngine.has_reduced
    ReducerEngine.has_reduced = lambda engine: looks.append(1) or has_reduced(engine)
    for step in range(20):
        wrapped(batch(step, group.rank())).sum().backward()
    return hasattr(early, "reducer"), len(looks)


def test_a_step_is_looked_for_once(tmp_path):
    """A look is at the notes of all gradients, and torch asks for its reducer again and again."""
    assert on_two(looks_at_the_reducer, scratch=tmp_path) == [(False, 20)] * 2


def settled_static_graph(group):
    wrapped = DistributedDataParallel(
        network(), static_graph=True, plan=plan_of(2, 3), replan_when=1e6
    )
    is_watched = wrapped._driver is not None
    copied = []
    for step in range(5):
        output = wrapped(batch(step, group.rank()))
        copied.append("DDPSink" in type(output.grad_fn).__name__)
        output.sum().backward()
    return is_watched and wrapped._driver is not None, copied


def test_outputs_of_a_settled_static_graph_are_not_copied(tmp_path):
    """Once, by torch itself; planning may want it in any forward pass while buckets may change."""
    found = on_two(settled_static_graph, scratch=tmp_path)
    assert found == [(True, [True, False, False, False, False])] * 2


def known_by_its_module(group, kind, settled):
    """As in Lightning, whose modules reach the wrapper through their trainer."""
    model = network()
    wrapped = kind(model, **QUICK)
    model.trainer = [wrapped]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(MOST_STEPS if settled else 3):
        optimizer.zero_grad()
        wrapped(batch(step, group.rank())).sum().backward()
        optimizer.step()
        if wrapped.findings().stage == "settled":
            break
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()
    gone = weakref.ref(wrapped)
    del wrapped, model, optimizer
    for _ in range(2):
        gc.collect()
    return gone() is None


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kind", [DistributedDataParallel, ShardedDataParallel])
def test_a_module_may_know_its_wrapper(tmp_path, kind, settled):
    assert on_two(known_by_its_module, kind, settled, scratch=tmp_path) == [True, True]


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown(group):
    """Of a hundred parameters over as many steps as would show a few bytes a parameter."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(100)]
    model = nn.Sequential(*layers)
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    halves = (tuple(names[:50]), tuple(names[50:]))
    buckets = tuple(Bucket(tensors=half, collective="native") for half in halves)
    wrapped = DistributedDataParallel(model, plan=Plan(planner="made", buckets=buckets))
    seen = []
    for step in range(3000):
        wrapped(torch.ones(1, 2)).sum().backward()
        if step in {1000, 2999}:
            gc.collect()
            seen.append(resident_bytes())
    return seen[1] - seen[0]


@pytest.mark.long
def test_settled_training_takes_no_more_memory_from_step_to_step(tmp_path):
    """torch notes the order of gradients until it has rebuilt its buckets: 16 bytes each."""
    assert max(on_two(grown, scratch=tmp_path)) < 100 * 2000 * 16 / 4


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
    assert on_two(copied, scratch=tmp_path) == ["Torch's own buckets stay: this is a copy."] * 2


PLANNED = [["1.weight", "0.bias"], ["1.bias", "0.weight"]]  # not in the order of gradients


def with_users_hook(wrapped):
    def hook(_, bucket):
        return default_hooks.allreduce_hook(wrapped.process_group, bucket)

    wrapped.register_comm_hook(None, hook)


def gone_on(group, others, kind, *, before=3, after=3, prepare=lambda wrapped: None, **options):
    """Weights and buckets of two ranks of three, the third of which left in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    wrapped = kind(model, bucket_cap_mb=0.0001, **options)
    prepare(wrapped)
    for number in range(before + after):
        if number == before:
            if group.rank() == 2:
                return None
            wrapped._update_process_group(others)
        torch.manual_seed(10 * number + group.rank())
        wrapped.zero_grad()
        wrapped(torch.randn(2, 4)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.05 * parameter.grad)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found = None if kind is TorchDDP else wrapped.findings()
    return weights, torch_bucket_bytes(wrapped), found


def gone_on_while_planning(group, step):
    others, steps = dist.new_group([0, 1]), {"before": step, "after": 12}
    quick = {"record_steps": 1, "trial_steps": 1, "planner": "single"}
    torchs = gone_on(group, others, TorchDDP, **steps)
    ours = gone_on(group, others, DistributedDataParallel, **steps, **quick)
    return torchs and (torchs[0], ours[0])


@pytest.mark.parametrize("step", [8, pytest.param(0, marks=pytest.mark.long)])
def test_ranks_may_leave_while_planning(tmp_path, step):
    one, other, _ = on_processes(3, gone_on_while_planning, step, scratch=tmp_path)
    (torchs, ours), (torchs_1, ours_1) = one, other
    assert torch.equal(torchs, torchs_1)
    assert torch.equal(ours, ours_1)
    assert torch.allclose(ours, torchs, atol=1e-6)


def gone_on_with_plans(group):
    others = dist.new_group([0, 1])
    buckets = tuple(Bucket(tensors=tuple(part), collective="native") for part in PLANNED)
    plan = Plan(planner="made", buckets=buckets)
    ours = partial(gone_on, group, others, DistributedDataParallel)
    return {
        "torch": gone_on(group, others, TorchDDP),
        "planning": ours(),
        "fixed": ours(plan=plan),
        "watched": ours(plan=plan, replan_when=5.0),
        "hook": ours(prepare=with_users_hook),
    }


def test_what_is_left_of_a_plan_where_ranks_have_left(tmp_path):
    """One that never changes stays; otherwise buckets are torch's, in the order of gradients."""
    one, other, _ = on_processes(3, gone_on_with_plans, scratch=tmp_path)
    torchs, torch_buckets, _ = one.pop("torch")
    for name, (weights, bytes_of_buckets, found) in one.items():
        assert torch.equal(weights, other[name][0]), name
        assert bytes_of_buckets == other[name][1], name
        assert torch.allclose(weights, torchs, atol=1e-6), name
        if name == "fixed":
            assert bytes_of_buckets == [160, 144]
            assert found.is_given
        else:
            assert bytes_of_buckets == torch_buckets, name
            assert not found.is_given
            assert found.plan is None
            assert found.predicted is None
        assert found.stage == "settled"


def joined_by_one_alone(group):
    """What each rank applies when rank 2 has trained alone before, and in which buckets."""
    rank, found = group.rank(), []
    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    for finds_unused in (False, True):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        wrapped = DistributedDataParallel(
            model,
            process_group=parts[rank == 2],
            bucket_cap_mb=0.0001,
            find_unused_parameters=finds_unused,
        )
        for number in range(8):
            if number == 5:
                wrapped._update_process_group(group)
            wrapped.zero_grad()
            wrapped(torch.full((2, 4), rank + 1.0)).sum().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found.append((gradients.tolist(), torch_bucket_bytes(wrapped)))
    return found


def test_one_that_was_alone_joins(tmp_path):
    first, *others = on_processes(3, joined_by_one_alone, scratch=tmp_path)
    assert others == [first] * 2
    assert [bytes_of_buckets for _, bytes_of_buckets in first] == [[144, 160], [16, 160, 128]]
    for gradients, _ in first:
        assert gradients[-4:] == [2.0] * 4  # the last bias: of two examples on every rank


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, fails):
        ctx.fails = fails
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise MemoryError("on this rank alone")
        return gradient, None


class MayFail(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 300), nn.Linear(300, 3)

    def forward(self, given, fails):
        return self.last(FailsInBackward.apply(self.first(given), fails))


def gone_on_after_a_failed_pass(group, kind, steps, store):
    """The gradients of a pass in another group, after one in which rank 1 failed half-way."""
    model = seeded(MayFail)
    wrapped = kind(model, process_group=group)
    rank = group.rank()
    # Rank 1 waits here until rank 0 has waited in vain there.
    other = gloo_group(store, rank, 2)
    for _ in range(steps):
        wrapped(torch.ones(2, 4), False).sum().backward()  # noqa: FBT003
    with pytest.raises((MemoryError, RuntimeError)):
        wrapped(torch.ones(2, 4), rank == 1).sum().backward()
    wrapped._update_process_group(other)
    for _ in range(2):
        model.zero_grad()
        wrapped(torch.ones(2, 4) * (rank + 1), False).sum().backward()  # noqa: FBT003
    return [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("steps", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 14))])
def test_ranks_go_on_in_another_group_after_a_failed_pass(steps):
    """As with torch, whatever planning was doing: steps are recorded, and messages noted."""
    made = [
        on_threads(
            2,
            gone_on_after_a_failed_pass,
            kind,
            steps,
            dist.HashStore(),
            timeout=timedelta(seconds=5),
        )
        for kind in (TorchDDP, DistributedDataParallel)
    ]
    assert made[0] == made[1]


def refused_other_group(group):
    wrapped = DistributedDataParallel(nn.Linear(4, 4), timeline=True)
    with pytest.raises(RequestError, match=r"ranks stay the same; wrap the model again") as refusal:
        wrapped._update_process_group(group)
    with pytest.raises(RequestError, match="there is one hook per wrapper"):
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    static = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    with pytest.raises(RequestError, match="with static_graph ranks stay the same; wrap the model"):
        static._update_process_group(group)
    names = [name for name, _ in nn.Linear(4, 4).named_parameters()]
    plan = Plan(planner="made", buckets=(Bucket(tensors=tuple(names), collective="native"),))
    hooked = DistributedDataParallel(nn.Linear(4, 4), plan=plan)
    with_users_hook(hooked)
    with pytest.raises(RequestError, match="with a hook of yours on a plan's buckets ranks stay"):
        hooked._update_process_group(group)
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    was_alone = DistributedDataParallel(nn.Linear(4, 4), plan=plan, process_group=alone)
    with pytest.raises(RequestError, match="plan that was left out, because there was one worker,"):
        was_alone._update_process_group(group)
    return "\n" in str(refusal.value)


def test_hooks_of_ours_keep_their_group(tmp_path):
    assert on_processes(2, refused_other_group, scratch=tmp_path) == [False, False]

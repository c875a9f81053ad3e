"""torch's own wrapper, watched: it trains as ever, and leaves a run behind."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from ranks import on_processes
from small_training import TORCH_OPTIONS, batch, network, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import (
    CollectiveCost,
    DistributedDataParallel,
    Line,
    Network,
    RequestError,
    watch,
)
from gradweave._src.report.folders import read_folders

KNOWN = Network(
    name="known",
    source="made up",
    costs=(
        CollectiveCost(
            operation="all-reduce",
            collective="native",
            workers=2,
            cost=Line(startup_s=1e-3, s_per_byte=1e-8),
        ),
    ),
)


def taken(model, rank, *, steps, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate - 1):
            with model.no_sync():
                model(batch(1000 + accumulate * step + micro, rank)).square().mean().backward()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            model(batch(step, rank))
    return losses


def refused_alone(group):
    """Rank 1 has a hook of its own, catches what it is told, and goes on with its group."""
    model = TorchDDP(network())
    if group.rank():
        model.register_comm_hook(group, allreduce_hook)
        with pytest.raises(RequestError, match="has a communication hook"):
            watch(model)
    else:
        watch(model)
    message = torch.full((2,), float(group.rank() + 1), dtype=torch.float64)
    group.allreduce([message]).wait()
    return message.tolist()


def test_who_is_refused_leaves_nothing_in_the_users_group(tmp_path):
    assert on_processes(2, refused_alone, scratch=tmp_path) == [[3.0, 3.0]] * 2


def watched_on_rank_0_alone(group):
    model = TorchDDP(network())
    told = watch(model).metrics if group.rank() == 0 else dict
    return taken(model, group.rank(), steps=3)[-1], bool(told())


def test_one_rank_may_watch_by_itself(tmp_path):
    """Its numbers are there; only what is for all ranks needs all of them."""
    (_, is_told), (_, nothing) = on_processes(2, watched_on_rank_0_alone, scratch=tmp_path)
    assert (is_told, nothing) == (True, False)


def saved(group, folder, accumulate, steps, known):
    model = TorchDDP(network(), bucket_cap_mb=0.0002)
    watched = watch(model)
    losses = taken(model, group.rank(), steps=steps, accumulate=accumulate)
    watched.save_run(folder, losses=losses, network=known)
    return watched.timelines(), losses, watched.metrics()


@pytest.mark.parametrize("known", [None, KNOWN])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_of_torchs_wrapper(accumulate, known, tmp_path):
    path = tmp_path / "torch"
    results = on_processes(2, saved, str(path), accumulate, 12, known, scratch=tmp_path)
    timelines, losses, metrics = results[0]
    (folder,) = read_folders([path])
    run = folder.run
    (row,) = run.results.rows
    assert (row.runtime, row.workers) == ("torch-ddp", 2)
    assert row.messages == metrics["messages"] == len(run.plans["torch-ddp"].buckets) > 1
    messages = [span for span in timelines[0].spans if span.lane == "communication"]
    assert [bucket.tensors for bucket in run.plans["torch-ddp"].buckets] == [
        span.tensors for span in messages
    ]
    assert [len(one.spans) for one in run.measured["torch-ddp"]] == [
        len(one.spans) for one in timelines
    ]
    assert run.trace.origin == "measured"
    assert run.trace.batch_size == 4
    assert run.network == known or run.network.name == "learnt in training"
    assert "torch-ddp" in run.predicted
    assert (run.steps.stages, folder.losses.series[0].stages) == ((), ())
    assert None not in run.steps.phases
    assert metrics["step"] == len(run.steps.step_s) == 12
    assert folder.losses.series[0].losses == tuple(losses)
    assert "nothing was planned" in run.account.explanation


def test_a_run_of_few_steps_is_estimated(tmp_path):
    path = tmp_path / "torch"
    on_processes(2, saved, str(path), 1, 3, None, scratch=tmp_path)
    (folder,) = read_folders([path])
    assert folder.run.trace.origin == "estimated"
    assert "torch-ddp" in folder.run.predicted


def same_weights(group, options, accumulate):
    plain, noted = TorchDDP(network(), **options), TorchDDP(network(), **options)
    watched = watch(noted)
    results = [
        trained(model, group.rank(), steps=12, accumulate=accumulate)[1] for model in (plain, noted)
    ]
    return watched.metrics()["step"], all(map(torch.equal, *results))


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("options", TORCH_OPTIONS)
def test_weights_are_the_same_bits(options, accumulate, tmp_path):
    """With three ranks, where a quotient would differ from a product."""
    results = on_processes(3, same_weights, TORCH_OPTIONS[options], accumulate, scratch=tmp_path)
    assert results == [(12, True)] * 3


def dies(group, steps):
    model = TorchDDP(network())
    module = model.module
    module.trainer = [model]  # as in Lightning
    watched = watch(model)
    taken(model, group.rank(), steps=steps)
    gone = weakref.ref(model)
    del module.trainer
    gc.disable()
    del model
    hooks = [parameter._backward_hooks for parameter in module.parameters()]
    try:
        watched.save_run("anywhere")
    except Exception as error:
        return gone() is None, hooks == [None] * len(hooks), str(error)


@pytest.mark.parametrize("steps", [2, 9])  # while it is recorded, and later
def test_nothing_keeps_the_wrapper_alive(steps, tmp_path):
    line = "the wrapper is gone; save its run, and ask, while it is there"
    assert on_processes(2, dies, steps, scratch=tmp_path) == [(True, True, line)] * 2


def copied(group):
    model = TorchDDP(network())
    watched = watch(model)
    taken(model, group.rank(), steps=2)
    pickled = pickle.dumps(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickled)):  # noqa: S301 our own
        twin(batch(0, group.rank())).sum().backward()
    return watched.metrics()["step"]


def test_copies_are_not_watched(tmp_path):
    assert on_processes(2, copied, scratch=tmp_path) == [2, 2]


class Model(nn.Sequential):
    """With a forward of its own: torch's would not be compiled, only inlined."""

    def forward(self, value):
        for part in self:
            value = part(value)
        return value


def compiled(group, folder, where):
    plain, module = TorchDDP(Model(*network())), Model(*network())
    if where == "inside":
        module = torch.compile(module, backend="eager")
    model = TorchDDP(module)
    watched = watch(model)
    called = torch.compile(model, backend="eager") if where == "around" else model
    for training in (plain, called):
        for step in range(10):
            training(batch(step, group.rank())).square().mean().backward()
    watched.save_run(folder)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return watched.metrics()["step"], all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("where", ["inside", pytest.param("around", marks=pytest.mark.long)])
def test_compiled_models(where, tmp_path):
    path = tmp_path / "torch"
    assert on_processes(2, compiled, str(path), where, scratch=tmp_path) == [(10, True)] * 2
    (folder,) = read_folders([path])
    assert len(folder.run.measured["torch-ddp"]) == 2
    assert folder.run.trace.origin == "estimated"


def late(group):
    model = TorchDDP(network())
    taken(model, group.rank(), steps=1)
    return model


def twice(group):
    model = TorchDDP(network())
    model.watched = watch(model)
    return model


def hooked(group):
    model = TorchDDP(network())
    model.register_comm_hook(None, allreduce_hook)
    return model


def ours(group):
    return DistributedDataParallel(network())


def unwrapped(group):
    return network()


def sparse(group):
    return TorchDDP(nn.Embedding(3, 2, sparse=True))


MISTAKES = {
    late: "the wrapper has run a backward pass; call watch() before the first one",
    twice: "the wrapper has a communication hook, and there is one per wrapper; watch it without",
    hooked: "the wrapper has a communication hook, and there is one per wrapper; watch it without",
    ours: "DistributedDataParallel of Gradweave is watched by itself; call its own save_run() and "
    "metrics()",
    unwrapped: "watch() takes a model in torch.nn.parallel.DistributedDataParallel, got Sequential",
    sparse: "'Embedding' has sparse gradients, which a hook cannot send; use sparse=False",
}


def refused(group, make):
    model = make(group)
    try:
        watch(model)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("make", MISTAKES)
def test_a_mistake_is_one_line(make, tmp_path):
    assert on_processes(2, refused, make, scratch=tmp_path) == [MISTAKES[make]] * 2


def too_early(group, folder):
    model = TorchDDP(network())
    watched = watch(model)
    if group.rank() == 0:
        model(batch(0, 0))  # without backward: ranks need not be alike in that
    try:
        watched.save_run(folder)
    except ValueError as error:
        return str(error)


def test_nothing_to_save_yet(tmp_path):
    line = "the run was not saved: rank 0: no step was seen to end; save the run after some steps"
    assert on_processes(2, too_early, str(tmp_path / "mine"), scratch=tmp_path) == [line] * 2

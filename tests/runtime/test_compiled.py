"""torch.compile, around the wrapper and inside: torch's gradients, a given plan, no planning."""

import logging

import pytest
import torch
import torch.distributed as dist
from small_training import QUICK, batch, network, on_two, plan_of, trained
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.torch_internals import torch_bucket_bytes

WHY = "a compiled model is not planned for in training; give a plan, made without compiling"


class Model(nn.Sequential):
    """With a forward of its own: torch's would not be compiled, only inlined."""

    def forward(self, value):
        for part in self:
            value = part(value)
        return value


def model():
    return Model(*network())


def warnings_of_ours():
    """Of this rank, as they come."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("gradweave").addHandler(handler)
    return found


def gradients(call, rank):
    found = []
    for step in range(8):
        call.zero_grad()
        call(batch(step, rank)).square().sum().backward()
        found.append([p.grad.clone() for p in call.parameters()])
    return found


def same_gradients(call, rank):
    """As torch's wrapper gives without a compiler, which may calculate in another order."""
    pairs = zip(gradients(call, rank), gradients(TorchDDP(model()), rank), strict=True)
    each = (zip(ours, torchs, strict=True) for ours, torchs in pairs)
    return all(torch.allclose(a, b, rtol=1e-5) for step in each for a, b in step)


def compiled(group, where, backend, options):
    found = warnings_of_ours()
    if where == "inside":
        call = wrapped = DistributedDataParallel(torch.compile(model(), backend=backend), **options)
    elif where == "around":
        wrapped = DistributedDataParallel(model(), **options)
        call = torch.compile(wrapped, backend=backend)
    else:
        call = wrapped = DistributedDataParallel(model(), **options)
        wrapped.module.compile(backend=backend)
    same = same_gradients(call, group.rank())
    assert counters["stats"]["unique_graphs"] > 0
    return same, found, wrapped.explain(), torch_bucket_bytes(wrapped)


@pytest.mark.parametrize(
    "where",
    ["inside", *(pytest.param(name, marks=pytest.mark.long) for name in ("around", "in place"))],
)
def test_without_a_plan_torchs_buckets_stay(tmp_path, where):
    """Seconds: every rank imports a compiler."""
    found = on_two(compiled, where, "eager", {}, scratch=tmp_path)
    for rank, (same, warnings, explained, _) in enumerate(found):
        assert same
        # One of all ranks says that planning has ended.
        assert warnings == [f"keeping torch's own buckets: {WHY}"] * (rank == 0)
        assert explained == f"Torch's own buckets stay: {WHY}."


@pytest.mark.long
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_given_plan_is_used_and_stays(tmp_path, where):
    """Though all its buckets are smaller than the 1 MiB that torch.compile asks for."""
    options = {"plan": plan_of(1, 1, 3), "replan_when": 0.1}
    found = on_two(compiled, where, "eager", options, scratch=tmp_path)
    for rank, (same, warnings, explained, sizes) in enumerate(found):
        assert same
        assert warnings == [f"no more planning again: {WHY}"] * (rank == 0)
        assert explained == "3 messages by native, as given."
        assert sizes == [40, 20, 432]


@pytest.mark.long
def test_code_that_yields_gradients_in_another_order(tmp_path):
    """A compiled backward pass yields all at once, in the order of declaration; buckets stay."""
    options = {"plan": plan_of(2, 3)}
    for same, warnings, _, sizes in on_two(
        compiled, "inside", "aot_eager", options, scratch=tmp_path
    ):
        assert same
        assert not warnings
        assert sizes == [60, 432]


def compiled_late(group, where):
    """When planning has begun."""
    found = warnings_of_ours()
    wrapped = DistributedDataParallel(model(), **QUICK)
    trained(wrapped, group.rank(), steps=3)
    before = wrapped.findings().stage
    wrapped.module.load_state_dict(network().state_dict())
    if where == "around":
        call = torch.compile(wrapped, backend="eager")
    else:
        call = wrapped
        wrapped.module.compile(backend="eager")
    same = same_gradients(call, group.rank())
    hooks = sum(len(part._forward_pre_hooks) for part in wrapped.module.modules())
    return before, same, found, wrapped.findings().stage, hooks


@pytest.mark.parametrize("where", [pytest.param("around", marks=pytest.mark.long), "in place"])
def test_planning_ends_where_compiled_code_begins(tmp_path, where):
    said = [f"keeping torch's own buckets: {WHY}"]
    assert on_two(compiled_late, where, scratch=tmp_path) == [
        ("recording", True, said, "settled", 0),
        ("recording", True, [], "settled", 0),
    ]


def compiled_on_one_rank(group):
    """Which torch's wrapper does not mind."""
    wrapped = DistributedDataParallel(model(), **QUICK)
    for step in range(20):
        if step == 5 and group.rank() == 0:
            wrapped.module[0].compile(backend="eager")
        wrapped.zero_grad()
        wrapped(batch(step, group.rank())).square().sum().backward()
    return wrapped.explain(), [p.grad.tolist() for p in wrapped.parameters()]


def test_one_rank_may_compile_alone(tmp_path):
    (first, gradients), (second, others) = on_two(compiled_on_one_rank, scratch=tmp_path)
    assert first == second == f"Torch's own buckets stay: {WHY}."
    assert gradients == others


def evaluated_after_planning(group):
    """A hook ends planning; then rank 0 alone calls the model before all sum up a metric."""
    wrapped = DistributedDataParallel(model(), **QUICK)
    metrics = []
    for step in range(12):
        if step == 5:
            wrapped.register_comm_hook(group, allreduce_hook)
        wrapped(batch(step, group.rank())).square().sum().backward()
        if step > 5 and group.rank() == 0:
            wrapped(batch(step, 0))
        metric = torch.ones(1)
        dist.all_reduce(metric)
        metrics.append(metric.item())
    return metrics


def test_one_rank_may_evaluate_after_planning_was_ended(tmp_path):
    assert on_two(evaluated_after_planning, scratch=tmp_path) == [[2.0] * 12] * 2

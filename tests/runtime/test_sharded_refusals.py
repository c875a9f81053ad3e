"""What sharded training refuses, and what it notices."""

import logging

import pytest
import torch
from sharded_training import BACKWARD_ONLY, MADE, TENSORS, batches, on_ranks, plan, sharded, small
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from gradweave._src.errors import CollectiveError, PlanMismatch, RequestError

FORMATS = (torch.contiguous_format, torch.channels_last)


def complaints(group, twins):
    found = []
    for model, options in (
        (nn.Embedding(3, 2, sparse=True), {}),
        (nn.ReLU(), {}),
        (small(), {"plan": plan(("0.weight",))}),
        (nn.Linear(2, 2 + group.rank()), {}),
        (nn.Conv2d(2, 2, 2).to(memory_format=FORMATS[group.rank()]), {}),
        (small(), {"plan": plan(*TENSORS, collective="mst")}),
        (torch.compile(small(), backend="eager"), {"plan": MADE}),
    ):
        with pytest.raises((RequestError, PlanMismatch)) as caught:
            sharded(group, twins, model, **options)
        found.append(str(caught.value))
    wrapped = sharded(group, twins, small(), plan=MADE)
    for refused in (
        wrapped.half,
        lambda: wrapped.load_state_dict(wrapped.state_dict(), assign=True),
    ):
        with pytest.raises(RequestError, match="buckets"):
            refused()
    for joined in (wrapped.join, lambda: Join([wrapped])):
        with pytest.raises(RequestError, match="ShardedDataParallel has no join"):
            joined()
    return found


def test_what_it_refuses():
    for found in on_ranks(2, complaints):
        assert [text.split(";")[0] for text in found] == [
            "'Embedding' has sparse gradients, which have no place in a bucket",
            "the model has no parameter that requires a gradient",
            "3 parameters of the model are in no bucket, first '0.bias'",
            (
                "ranks wrap differently: parameter 'weight' is (2, 2) with strides (2, 1), "
                "torch.float32 on rank 0 and (3, 2) with strides (2, 1), torch.float32 on rank 1"
            ),
            (
                "ranks wrap differently: parameter 'weight' is (2, 2, 2, 2) with strides "
                "(8, 4, 2, 1), torch.float32 on rank 0 and (2, 2, 2, 2) with strides (8, 1, 4, 2), "
                "torch.float32 on rank 1"
            ),
            "no reduce-scatter and all-gather by 'mst'",
            "a compiled model may not wait for its parameters",
        ]


def checkpointed(group, twins, kind):
    """A layer that is used inside a checkpoint and outside of it."""
    model = sharded(
        group, twins, nn.Sequential(nn.Linear(6, 6)), plan=plan(("0.bias",), ("0.weight",))
    )
    layer = model.module[0]

    def forward(inputs):
        inside = checkpoint(layer, inputs, use_reentrant=kind == "reentrant")
        return inside.sum() + layer(inputs).sum()

    model.module.forward = forward
    model(torch.ones(2, 6, requires_grad=True)).backward()
    return [shard.grad.clone() for shard in model.parameters()]


def test_reentrant_checkpoints_are_refused_where_gradients_come_late():
    assert all(gradient.all() for gradient in on_ranks(1, checkpointed, "plain")[0])
    with pytest.raises(AssertionError) as caught:
        on_ranks(1, checkpointed, "reentrant")
    assert "use_reentrant=False" in str(caught.value.__cause__)


def interrupted(group, twins):
    model = sharded(group, twins, small(), plan=MADE)

    def fail(_):
        raise ValueError("the user's own mistake")

    model.module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="own mistake"):
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(CollectiveError, match="a backward pass did not end"):
        model(torch.ones(2, 6, dtype=torch.float64))


def test_a_backward_pass_that_fails_is_not_forgotten():
    on_ranks(1, interrupted)


def older_graph(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = (model(torch.ones(2, 6, dtype=torch.float64)) ** 2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    model.synchronise()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_notices_graphs_of_older_weights():
    on_ranks(1, older_graph)


def stepped(group, twins, make, options=None):
    """A step by an optimizer that is made from a model and its wrapper."""
    model = small()
    wrapped = sharded(group, twins, model, **{"plan": MADE, **(options or {})})
    optimizer = make(model, wrapped)
    (wrapped(batches(group.size())[0][group.rank()]) ** 2).mean().backward()
    optimizer.step(*([lambda: 0.0] if isinstance(optimizer, torch.optim.LBFGS) else []))
    wrapped.synchronise()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda model, _: torch.optim.AdamW(model.parameters()), "the model's own '0.weight'"),
        (lambda _, wrapped: torch.optim.Adafactor(wrapped.parameters()), "Adafactor does not"),
        (lambda _, wrapped: torch.optim.LBFGS(wrapped.parameters()), "LBFGS does not"),
    ],
    ids=["before wrapping", "adafactor", "lbfgs"],
)
def test_optimizers_that_would_train_wrongly_are_refused(make, why):
    with pytest.raises(AssertionError) as caught:
        on_ranks(1, stepped, make)
    assert isinstance(caught.value.__cause__, RequestError)
    assert why in str(caught.value.__cause__)


class Lamb(torch.optim.SGD):
    """By the norm of a whole tensor; the tests need no more of it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=float(parameter.norm()))


class Renamed(torch.optim.AdamW):
    """Steps as torch's."""


@pytest.mark.parametrize(
    ("kind", "trusted", "warned"),
    [(Lamb, [], True), (Lamb, [Lamb], False), (Renamed, [], False), (torch.optim.SGD, [], False)],
)
def test_unknown_optimizers_are_warned_of_once(kind, trusted, warned, caplog):
    with caplog.at_level(logging.WARNING):
        on_ranks(
            1,
            stepped,
            lambda _, wrapped: twice(kind(wrapped.parameters(), lr=0.1)),
            {"elementwise": trusted},
        )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    assert all("Lamb must update each element by itself" in text for text in said)


def twice(optimizer):
    """It has stepped before, without gradients of its own."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


clip_grad_norm_ = nn.utils.clip_grad_norm_  # as scripts import it, before anything is wrapped


def clipped_by_torch(group, twins, given):
    wrapped = sharded(group, twins, small(), plan=given)
    (wrapped(batches(group.size())[0][group.rank()]) ** 2).mean().backward()
    others = small()
    (others(torch.ones(2, 6, dtype=torch.float64)) ** 2).mean().backward()
    clip_grad_norm_(others.parameters(), 1.0)
    clip_grad_norm_(wrapped.parameters(), 1.0)


def test_torchs_clipping_is_refused_where_ranks_have_parts():
    on_ranks(1, clipped_by_torch, MADE)
    on_ranks(2, clipped_by_torch, BACKWARD_ONLY)
    with pytest.raises(AssertionError) as caught:
        on_ranks(2, clipped_by_torch, MADE)
    assert "clip by the wrapper's clip_grad_norm_" in str(caught.value.__cause__)


def unfrozen(group, twins):
    model = small()
    model[0].requires_grad_(requires_grad=False)
    wrapped = sharded(group, twins, model, plan=plan(("2.bias", "2.weight")))
    model[0].requires_grad_(requires_grad=True)
    wrapped(torch.ones(2, 6, dtype=torch.float64))


def test_what_is_unfrozen_has_no_bucket():
    with pytest.raises(AssertionError) as caught:
        on_ranks(1, unfrozen)
    assert "'0.weight' was frozen when the model was wrapped" in str(caught.value.__cause__)

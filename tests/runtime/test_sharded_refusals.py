"""What sharded training refuses, and what it notices."""

import pytest
import torch
from sharded_training import MADE, TENSORS, on_ranks, plan, sharded, small
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave.errors import CollectiveError, PlanMismatch, RequestError


def complaints(group, twins):
    found = []
    for model, options in (
        (nn.Embedding(3, 2, sparse=True), {}),
        (nn.ReLU(), {}),
        (small(), {"plan": plan(("0.weight",))}),
        (nn.Linear(2, 2 + group.rank()), {}),
        (small(), {"plan": plan(*TENSORS, collective="mst")}),
        (torch.compile(small(), backend="eager"), {"plan": MADE}),
    ):
        with pytest.raises((RequestError, PlanMismatch)) as caught:
            sharded(group, twins, model, **options)
        found.append(str(caught.value))
    wrapped = sharded(group, twins, small(), plan=MADE)
    for refused in (
        wrapped.half,
        lambda: wrapped.requires_grad_(requires_grad=False),
        lambda: wrapped.load_state_dict(wrapped.state_dict(), assign=True),
    ):
        with pytest.raises(RequestError, match="buckets"):
            refused()
    return found


def test_what_it_refuses():
    for found in on_ranks(2, complaints):
        assert [text.split(";")[0] for text in found] == [
            "'Embedding' has sparse gradients, which have no place in a bucket",
            "the model has no parameter that requires a gradient",
            "3 parameters of the model are in no bucket, first '0.bias'",
            "ranks [1] have other parameters than rank 0",
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

"""A script may have another default device than the one its model is on."""

import pytest
import torch
from ranks import on_processes
from small_training import QUICK, batch, network
from torch import nn

from gradweave import GTopK
from gradweave._src.runtime.ddp import DistributedDataParallel

# Tensors that are made there have no values: whoever makes one on the thread that trains, and
# forgets to say where, fails or has none. Other threads have a default of their own.
ELSEWHERE = torch.device("meta")
STEPS = 60  # who is slow is told by twenty whole ones


def trained(group, arguments, default_device):
    model = network()
    data = [batch(step, group.rank()) for step in range(STEPS)]
    torch.set_default_device(default_device)
    try:
        wrapped = DistributedDataParallel(model, **QUICK, **arguments)
        for one in data:
            model.zero_grad()
            wrapped(one).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
        if "timeline" in arguments:
            wrapped.timelines()
            wrapped.slow_ranks()
    finally:
        torch.set_default_device("cpu")
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert "fail" not in (wrapped.findings().note or ""), wrapped.findings().note
    return weights.tolist()


def in_both(group, arguments):
    return [trained(group, arguments, device) for device in ("cpu", ELSEWHERE)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeline": True},
        {"compression": GTopK(0.2, whole_model=True)},
        pytest.param({"collective": "ring"}, marks=pytest.mark.long),
        {"precision": "int8"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_weights_are_the_same_whatever_it_is(tmp_path, arguments):
    """Of two ranks, so that plans, which clocks choose, cannot change them."""
    for ours, elsewhere in on_processes(2, in_both, arguments, scratch=tmp_path):
        assert elsewhere == ours

"""What an optimizer will keep is known before its first step, and asking changes nothing."""

import pytest
import torch
from torch import nn

from gradweave import RequestError
from gradweave.checkpoint.kept_by_optimizers import kept_for

MAKES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "lr is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


def described(kept):
    return [
        {key: getattr(value, "shape", None) for key, value in sorted(values.items())}
        for values in kept.values()
    ]


@pytest.mark.parametrize("kind", MAKES)
def test_it_is_what_is_kept_after_a_step(kind):
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    before = [parameter.clone() for parameter in parameters]
    optimizer = MAKES[kind](parameters)
    groups = [dict(group) for group in optimizer.param_groups]
    expected = described(kept_for(optimizer))
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert [dict(group) for group in optimizer.param_groups] == groups
    was_empty = not optimizer.state
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert described(kept_for(optimizer)) == expected
    assert was_empty or kind == "Adagrad"


class Counts(torch.optim.Optimizer):
    """A class of the user's that looks at values, which parameters without memory do not have."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and not parameter.grad.isnan().any().item():
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


class WantsMore(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        raise TypeError("a closure is needed")


def test_classes_of_users_are_asked_too():
    parameter = nn.Parameter(torch.randn(3))
    assert dict(kept_for(Counts([parameter]))) == {parameter: {"count": 1}}
    with pytest.raises(RequestError, match=r"what WantsMore keeps .* \(a closure is needed\);"):
        kept_for(WantsMore([parameter]))

"""What an optimizer will keep is known before its first step, and asking changes nothing."""

import pytest
import torch
from torch import nn

from gradweave import RequestError
from gradweave._src.checkpoint.kept_by_optimizers import kept_for, plain_optimizer

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


class Shell(torch.optim.Optimizer):
    """As Accelerate and Fabric have them: another's groups and state, under its own name."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Keeps(torch.optim.SGD):
    """As ZeroRedundancyOptimizer: it steps another one, on parameters of its own choice."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.optim = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


def test_what_is_around_an_optimizer_is_looked_through():
    inner = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    assert plain_optimizer(inner) is inner
    assert plain_optimizer(Shell(Shell(inner))) is inner


def test_an_optimizer_that_keeps_another_is_refused():
    with pytest.raises(RequestError, match="Keeps keeps its state in a SGD of its own"):
        plain_optimizer(Keeps([nn.Parameter(torch.zeros(2))]))


def test_nothing_is_made_for_what_is_frozen():
    frozen, trained = (nn.Parameter(torch.zeros(2), requires_grad=one) for one in (False, True))
    assert list(kept_for(torch.optim.AdamW([frozen, trained]))) == [trained]


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

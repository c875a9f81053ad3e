"""Who waits for which parameters, and when."""

import copy
import io

import pytest
import torch
from torch import nn

from gradweave._src.runtime.flat.arrivals import Arrivals


class Borrowing(nn.Module):
    """Calls one of its modules, and reads a parameter of another that it does not call."""

    def __init__(self):
        super().__init__()
        self.called, self.borrowed, self.idle = (nn.Linear(2, 2) for _ in range(3))
        self.own = nn.Parameter(torch.ones(2))

    def forward(self, batch):
        return nn.functional.linear(self.called(batch), self.borrowed.weight) * self.own


class Awaited:
    def __init__(self, name, log, error=None):
        self.name, self.log, self.error = name, log, error

    def wait(self):
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def expected_by(model, arrivals, log):
    for name, parameter in model.named_parameters():
        arrivals.expect([parameter], Awaited(name, log))


def test_modules_wait_for_what_they_read():
    model = Borrowing()
    arrivals = Arrivals(model, model.parameters())
    with arrivals.noting():
        model(torch.ones(1, 2))
    log = []
    expected_by(model, arrivals, log)
    model.register_forward_pre_hook(lambda *_: log.append("in the model"))
    model.called.register_forward_pre_hook(lambda *_: log.append("in the module"))
    model(torch.ones(1, 2))
    arrivals.wait_for_all()
    # Its own, those nobody was seen to read, and then those of the module that is called.
    at_model = ["borrowed.bias", "idle.bias", "idle.weight", "own"]
    at_module = ["borrowed.weight", "called.bias", "called.weight"]
    first = log.index("in the model")
    assert sorted(log[:first]) == at_model
    assert sorted(log[first + 1 : -1]) == at_module
    assert (log[-1], len(log)) == ("in the module", len(at_model) + len(at_module) + 2)


def test_what_has_failed_has_not_arrived():
    model = nn.Linear(2, 2)
    arrivals = Arrivals(model, model.parameters())
    arrivals.expect(model.parameters(), Awaited("lost", [], error=RuntimeError("gone")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="gone"):
        arrivals.wait_for_all()


def test_hooks_go():
    model = Borrowing()
    Arrivals(model, model.parameters()).close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_copies_and_files_of_a_module_wait_for_nobody():
    model = Borrowing()
    arrivals = Arrivals(model, model.parameters())
    log = []
    expected_by(model, arrivals, log)
    file = io.BytesIO()
    torch.save(model.called, file)
    assert b"gradweave" not in file.getvalue()
    file.seek(0)
    for copied in (copy.deepcopy(model.called), torch.load(file, weights_only=False)):
        assert torch.equal(copied(torch.ones(1, 2)), model.called(torch.ones(1, 2)))
    assert set(log) == {"called.weight", "called.bias"}  # by the model's own module alone

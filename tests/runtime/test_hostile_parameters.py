"""Parameters of any name are planned for, kept and told about as others are."""

import logging

import pytest
import torch
from mutations import NAMES
from small_training import QUICK, on_two
from torch import nn

from gradweave import Recipe
from gradweave._src import files
from gradweave._src.report.folders import read_folders
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel

# Of what torch takes for a name, which must have no dot.
PARAMETERS = [name.replace(".", "")[:1000] for name in NAMES.values()]
MOST_STEPS = 600


class Named(nn.Module):
    """Layers whose parameters are called so, one behind the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in PARAMETERS:
            self.register_parameter(name, nn.Parameter(torch.randn(6, 6)))

    def forward(self, x):
        for name in PARAMETERS:
            x = torch.tanh(x @ getattr(self, name))
        return x


def trained(group, kind, folder):
    """Until it has settled; what was planned for, what was said, and what was kept."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gradweave").addHandler(handler)
    wrap = ShardedDataParallel if kind == "sharded" else DistributedDataParallel
    wrapped = wrap(Named(), cache=folder / "cache", **QUICK)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(MOST_STEPS):
        torch.manual_seed(1000 * step + group.rank())
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        if wrapped.findings().stage == "settled":
            break
    found = wrapped.findings()
    wrapped.save_run(folder / "run")
    planned = {name for bucket in found.plan.buckets for name in bucket.tensors}
    return found.note, planned, wrapped.explain(), said, wrapped.recipe().to_text()


@pytest.mark.parametrize("kind", ["dense", "sharded"])
def test_planning_goes_on_whatever_parameters_are_called(tmp_path, kind):
    for note, planned, explained, said, recipe in on_two(trained, kind, tmp_path, scratch=tmp_path):
        assert note is None or "order" not in note
        assert planned == set(PARAMETERS)
        assert all(line.isprintable() for line in explained.split("\n"))
        assert all(line.isprintable() for line in said)
        assert {t.name for t in Recipe.from_text(recipe).trace.tensors} == set(PARAMETERS)
    (folder,) = read_folders([tmp_path / "run"])
    assert {tensor.name for tensor in folder.run.trace.tensors} == set(PARAMETERS)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert files.dumps(folder.run.trace)

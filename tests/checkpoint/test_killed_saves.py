"""A save that is killed leaves the checkpoint that was there, or the new one; and no more files."""

import pytest
import torch
from killed_writes import EVERY_CALL, after_kills
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import TrainingState


@pytest.mark.parametrize("most", [12, pytest.param(EVERY_CALL, marks=pytest.mark.long)])
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path, most):
    told = after_kills("training", tmp_path, most=most)
    assert set(told["found"]) == {"old", "new"}
    assert sum(told["found"].values()) > 0.5 * min(most, told["stops"])
    assert told["last"] == "new"


def saved_often(group, folder):
    """In one folder; each takes the place of the one before it."""
    torch.manual_seed(0)
    model = TorchDDP(nn.Linear(20, 20))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.module.weight.fill_(value)
        state.save(folder)
    with torch.no_grad():
        model.module.weight.fill_(-1.0)
    state.load(folder)
    return model.module.weight.unique().tolist()


def test_a_folder_can_be_used_again(tmp_path):
    folder = tmp_path / "last"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "__0_0.distcp").write_text("of a save by torch's own writer that was killed")
    assert on_processes(2, saved_often, folder, scratch=tmp_path) == [[3.0], [3.0]]
    names = sorted(path.name for path in folder.iterdir())
    data = [name for name in names if name.endswith(".distcp")]
    assert 1 <= len(data) <= 2
    assert "__0_0.distcp" not in data
    assert sorted({*names} - {*data}) == [".metadata", "notes.txt"]

"""torch.distributed.checkpoint's own calls keep no part of a sharded state for the whole."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interrupted_trainings import made, network, run, train
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from gradweave import RequestError, TrainingState

WHOLE = StateDictOptions(full_state_dict=True)


def asked(group, folder):
    """Fresh, and after a step: nothing is changed by what is refused."""
    model, optimizer = made("sharded", "adamw")
    ways = {
        "get": lambda: get_state_dict(model, optimizer),
        "whole": lambda: get_optimizer_state_dict(model, optimizer, options=WHOLE),
        "model": lambda: get_model_state_dict(model),
        "set": lambda: set_state_dict(
            model, optimizer, model_state_dict={}, optim_state_dict={"state": {}}
        ),
    }
    found = []
    for steps in (0, 1):
        train(model, optimizer, group, 0, steps)
        for ask in ways.values():
            with pytest.raises(RequestError) as caught:
                ask()
            found.append(str(caught.value))
        counts = [int(kept["step"]) for kept in optimizer.state.values()]
        assert counts == [steps] * (4 * steps)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    beside = dist.new_group(backend="gloo")
    for writer in (None, FileSystemWriter(folder)):
        for state in ({"optimizer": optimizer}, {"training": TrainingState(model, optimizer)}):
            if writer is None and "training" in state:
                continue  # which is whole
            with pytest.raises(RequestError) as staging:
                dcp.async_save(
                    state, checkpoint_id=folder, storage_writer=writer, process_group=beside
                ).result()
            assert "shard" in str(staging.value) or "this rank's part" in str(staging.value)
    return found, str(caught.value), (folder / ".metadata").exists()


def test_what_would_lose_state_is_refused(tmp_path):
    for found, of_save, is_written in run(2, asked, tmp_path / "a", scratch=tmp_path / "ranks"):
        assert len(set(found)) == 1
        assert found[0].startswith("torch.distributed.checkpoint.state_dict takes shards for whole")
        assert "\n" not in found[0]
        assert "is a shard, of which torch.distributed.checkpoint would keep one rank's" in of_save
        assert "save gradweave.TrainingState(model, optimizer) instead" in of_save
        assert not is_written


def plain(group, folder):
    """A rank's own state dict is otherwise what it always was."""
    model, optimizer = made("sharded", "adamw")
    train(model, optimizer, group, 0, 2)
    state = optimizer.state_dict()
    path = folder / f"{group.rank()}.pt"
    torch.save(state, path)
    read = torch.load(path, weights_only=True)
    copied = deepcopy(state)
    kinds = {type(one["exp_avg"]) for kept in (read, copied) for one in kept["state"].values()}
    results = {type(one["exp_avg"] * 2) for one in state["state"].values()}
    optimizer.load_state_dict(state)
    held = {type(kept["exp_avg"]) for kept in optimizer.state.values()}
    expected = train(model, optimizer, group, 2, 4)
    other, fresh = made("sharded", "adamw")
    train(other, fresh, group, 0, 2)
    fresh.load_state_dict(read)
    return kinds | results | held, train(other, fresh, group, 2, 4), expected


def test_a_state_dict_is_of_plain_tensors_everywhere_else(tmp_path):
    for kinds, state, expected in run(2, plain, tmp_path, scratch=tmp_path / "ranks"):
        assert kinds == {torch.Tensor}
        assert state == expected


def test_a_module_alone_is_not_refused():
    assert get_model_state_dict(network()).keys() == network().state_dict().keys()


def test_a_model_that_is_not_wrapped():
    complaint = "^TrainingState takes a wrapped model: .*; got a Sequential$"
    with pytest.raises(RequestError, match=complaint):
        TrainingState(network())

"""Trainings go on from checkpoints of torch.distributed.checkpoint as if nothing had happened."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interrupted_trainings import (
    OPTIMIZERS,
    SAVED_AFTER,
    STEPS,
    assert_equal,
    made,
    network,
    run,
    train,
)
from torch.distributed.checkpoint import CheckpointException

import gradweave
from gradweave import RequestError, TrainingState, saved_recipe


def whole(group, wrapper, optimizer):
    model, steps = made(wrapper, optimizer)
    return train(model, steps, group, 0, STEPS)


def saved(group, wrapper, optimizer, folder):
    model, steps = made(wrapper, optimizer)
    train(model, steps, group, 0, SAVED_AFTER)
    TrainingState(model, steps).save(folder)


def resumed(group, wrapper, optimizer, folder):
    """By a fresh optimizer, which has never taken a step."""
    model, steps = made(wrapper, optimizer)
    TrainingState(model, steps).load(folder)
    return train(model, steps, group, SAVED_AFTER, STEPS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_training_goes_on(tmp_path, optimizer):
    args = ("sharded", optimizer)
    expected = run(2, whole, *args, scratch=tmp_path / "whole")[0]
    run(2, saved, *args, tmp_path / "kept", scratch=tmp_path / "saved")
    states = run(2, resumed, *args, tmp_path / "kept", scratch=tmp_path / "resumed")
    assert_equal(states, expected)


@pytest.mark.parametrize(
    "wrapper", [pytest.param("ddp", marks=pytest.mark.long), "torch", "sparse"]
)
def test_other_trainings_go_on(tmp_path, wrapper):
    args = (wrapper, "plain" if wrapper == "sparse" else "adamw")
    expected = run(2, whole, *args, scratch=tmp_path / "whole")[0]
    run(2, saved, *args, tmp_path / "kept", scratch=tmp_path / "saved")
    states = run(2, resumed, *args, tmp_path / "kept", scratch=tmp_path / "resumed")
    assert_equal(states, expected)


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [("sharded", "sharded", 3), ("sharded", "ddp", 1), ("ddp", "sharded", 3)],
)
def test_other_ranks_and_wrappers_go_on_with_it(tmp_path, before, after, world):
    expected = run(2, whole, before, "adamw", scratch=tmp_path / "whole")[0]
    run(2, saved, before, "adamw", tmp_path / "kept", scratch=tmp_path / "saved")
    states = run(world, resumed, after, "adamw", tmp_path / "kept", scratch=tmp_path / "resumed")
    assert_equal(states, expected, rtol=1e-9, atol=1e-12)


def residuals(group, folder):
    """What all ranks carry over together, before it is saved or after it was loaded twice."""
    model, steps = made("sparse", "plain")
    state = TrainingState(model, steps)
    if not folder.exists():
        train(model, steps, group, 0, SAVED_AFTER)
        state.save(folder)
    else:
        state.load(folder)
        again = folder.with_name("again")
        state.save(again)  # by as many ranks as there are now
        model, steps = made("sparse", "plain")
        TrainingState(model, steps).load(again)
    found = model.sparse_state_dict()
    values = [found[kind]["values"] for kind in ("residuals", "velocities")]
    return found["step"], *({name: one[name].tolist() for name in one} for one in values)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 3])
def test_residuals_are_redistributed(tmp_path, world):
    kept = tmp_path / "kept"
    before = run(2, residuals, kept, scratch=tmp_path / "saved")
    after = run(world, residuals, kept, scratch=tmp_path / "loaded")
    assert {step for step, _, _ in before + after} == {SAVED_AFTER}
    for place, is_mean in ((1, False), (2, True)):
        for name in before[0][1]:
            old = sum(torch.tensor(one[place][name]) for one in before)
            new = sum(torch.tensor(one[place][name]) for one in after)
            if is_mean:
                old, new = old / 2, new / world
            assert old.any()
            torch.testing.assert_close(new, old)


def kept_beside(group, folder):
    """In a checkpoint of the user's, saved by another thread, and found by its own key."""
    model, steps = made("sharded", "adamw")
    train(model, steps, group, 0, SAVED_AFTER)
    state = TrainingState(model, steps)
    beside = dist.new_group(backend="gloo")  # for a thread that sends while training does
    writing = dcp.async_save(
        {"mine": state, "epoch": 7}, checkpoint_id=folder, process_group=beside
    )
    expected = train(model, steps, group, SAVED_AFTER, STEPS)
    writing.result()
    model, steps = made("sharded", "adamw")
    found = {"mine": TrainingState(model, steps), "epoch": 0}
    dcp.load(found, checkpoint_id=folder)
    states = train(model, steps, group, SAVED_AFTER, STEPS)
    return found["epoch"], states, expected


def test_it_is_a_part_of_any_checkpoint(tmp_path):
    for epoch, state, expected in run(2, kept_beside, tmp_path / "a", scratch=tmp_path / "b"):
        assert epoch == 7
        assert_equal([state], expected)


def planned(group, folder):
    model, steps = made("ddp", "adamw")
    state = TrainingState(model, steps)
    state.save(folder / "before")
    train(model, steps, group, 0, 40)
    state.save(folder / "after")
    return model.findings().stage, saved_recipe(folder / "before"), saved_recipe(folder / "after")


def test_the_recipe_is_in_it(tmp_path):
    """Once planning has settled; and it is what ``plan`` of a wrapper takes."""
    for stage, before, after in run(2, planned, tmp_path, scratch=tmp_path / "ranks"):
        assert stage == "settled"
        assert before is None
        assert after.workers == 2
        assert {t.name for t in after.trace.tensors} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert saved_recipe(tmp_path / "nothing") is None
    assert saved_recipe(tmp_path / "after", key="other") is None


def mistakes(group, folder):
    found = []
    model, steps = made("sharded", "adamw")
    train(model, steps, group, 0, 1)
    TrainingState(model, steps).save(folder)
    before = train(model, steps, group, 1, 2)
    for others in ([torch.optim.Adagrad(model.parameters())], [steps, steps], []):
        with pytest.raises((RequestError, CheckpointException)) as caught:
            TrainingState(model, *others).load(folder)
        found.append(str(caught.value))
    some = [p for name, p in model.named_parameters() if "weight" in name]
    with pytest.raises((RequestError, CheckpointException)) as caught:
        TrainingState(model, torch.optim.AdamW(some)).load(folder)
    found.append(str(caught.value))
    with pytest.raises(RequestError) as caught:
        TrainingState(model, torch.optim.SGD(network().parameters()))
    found.append(str(caught.value))
    assert train(model, steps, group, 2, 2) == before, "what is refused changes nothing"
    TrainingState(model).save(folder / "model")
    smaller = gradweave.DistributedDataParallel(network()[:2])
    with pytest.raises(RequestError) as caught:
        TrainingState(smaller).load(folder / "model")
    return [*found, str(caught.value)]


def test_what_does_not_fit_is_refused(tmp_path):
    for other, two, none, some, foreign, smaller in run(
        2, mistakes, tmp_path / "a", scratch=tmp_path / "b"
    ):
        has = "the checkpoint has a model, optimizers (AdamW) and no residuals, this training has a"
        assert other.startswith(f"{has} model, optimizers (Adagrad)")
        assert two.startswith(f"{has} model, optimizers (AdamW, AdamW)")
        assert smaller.startswith("the checkpoint's model has '2.bias' as torch.float64 of (3,), ")
        assert none.startswith(f"{has} model, optimizers (none) and no residuals; make the same")
        assert "groups of 4 parameters" in some
        assert "groups of 2 parameters" in some
        assert foreign.startswith("a parameter of SGD is not the model's; make the optimizer from")

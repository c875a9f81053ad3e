"""Accelerate with our wrapper: the same losses, recipes in states, torch's class elsewhere."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from launched import MOST_STEPS, QUICK, STEPS_AFTERWARDS, TORCHS, inputs_of, network, on_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from gradweave import DistributedDataParallel, RequestError
from gradweave._src import files
from gradweave._src.integrations.accelerate import use_gradweave
from gradweave._src.recipe import Recipe


class Pair(NamedTuple):
    logits: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class Nested(nn.Module):
    """Called by names, and its outputs are where they are."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, *, value):
        logits = self.net(value)
        return Pair(logits, {"squares": [logits.square()]})


def plain(accelerator, model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(value=batch).rest["squares"][0].mean()
    accelerator.backward(loss)
    optimizer.step()
    return loss


def accumulating(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = model(value=batch).rest["squares"][0].mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def evaluating(accelerator, model, optimizer, batch):
    model.eval()
    with torch.no_grad():
        seen = accelerator.gather_for_metrics(model(value=batch).logits.mean())
    model.train()
    return plain(accelerator, model, optimizer, batch) + 0 * seen.mean()


def synchronising_in_backward(accelerator, model, optimizer, batch):
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        losses = [model(value=part).rest["squares"][0].mean() for part in batch.chunk(2)]
        accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    return losses[1]


STEPS = {
    "plain": (plain, {}),
    "accumulating": (accumulating, {"gradient_accumulation_steps": 3}),
    "evaluating": (evaluating, {}),
    "synchronising in backward": (synchronising_in_backward, {}),
    "half the bits": (plain, {"mixed_precision": "bf16"}),
}


def batches(rank):
    while True:
        yield from DataLoader(list(inputs_of(rank, 120)), batch_size=4)


def made(accelerator):
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return accelerator.prepare(model, optimizer)


def losses_of(accelerator, habit, rank, steps, in_use=None):
    """Of so many steps; with ours, until some after planning has settled."""
    model, optimizer = made(accelerator)
    return taken(accelerator, model, optimizer, habit, rank, steps, in_use)


def taken(accelerator, model, optimizer, habit, rank, steps, in_use=None):
    losses, settled_for = [], 0
    for batch, _ in zip(batches(rank), range(steps), strict=False):
        losses.append(STEPS[habit][0](accelerator, model, optimizer, batch).item())
        settled_for += in_use is not None and in_use.findings().stage == "settled"
        if settled_for == STEPS_AFTERWARDS:
            break
    return losses


def side_by_side(rank, habit):
    options = STEPS[habit][1]
    ours = Accelerator(cpu=True, **options)
    in_use = use_gradweave(ours, **QUICK)
    losses = losses_of(ours, habit, rank, MOST_STEPS, in_use)
    torchs = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**TORCHS)], **options
    )
    expected = losses_of(torchs, habit, rank, len(losses))
    return losses, expected, in_use.findings(), in_use.explain()


@pytest.mark.parametrize("habit", STEPS)
def test_the_same_losses_as_with_torchs_class(tmp_path, habit):
    """Seconds: whole courses of planning, and the same training again."""
    for ours, torchs, found, explained in on_two(side_by_side, habit, scratch=tmp_path):
        assert ours == torchs
        assert STEPS_AFTERWARDS < len(ours) < MOST_STEPS
        assert found.stage == "settled"
        assert found.trace.batch_size == (2 if habit == "synchronising in backward" else 4)
        passes = {"accumulating": 3, "synchronising in backward": 2}.get(habit, 1)
        assert found.passes == passes
        assert explained.startswith("Measured: 6 gradients")


def kept(rank, folder):
    ours = Accelerator(cpu=True)
    in_use = use_gradweave(ours, **QUICK)
    model, optimizer = made(ours)
    taken(ours, model, optimizer, "plain", rank, MOST_STEPS, in_use)
    ours.save_state(folder)
    expected = taken(ours, model, optimizer, "plain", rank, 3)
    again = Accelerator(cpu=True)
    resumed = use_gradweave(again, **QUICK)
    model, optimizer = made(again)
    again.load_state(folder)
    at_once = resumed.plan == in_use.plan, resumed.findings().is_remembered
    losses = taken(again, model, optimizer, "plain", rank, 3)
    return at_once, losses, expected, in_use.recipe()


def test_a_state_has_the_recipe(tmp_path):
    results = on_two(kept, tmp_path / "state", scratch=tmp_path)
    for at_once, losses, expected, recipe in results:
        assert at_once == (True, True)
        assert losses == expected
        assert files.read(tmp_path / "state" / "gradweave_recipe_0.json", Recipe) == recipe


class Settled:
    """A wrapper whose recipe is this text, which notes what it is given."""

    def __init__(self, text=""):
        self.text, self.given = text, []

    def account(self):
        return self

    def recipe_text(self):
        return self.text

    def adopt(self, recipe):
        self.given.append(recipe)


def kept_in(folder, *texts):
    in_use = use_gradweave(Accelerator(cpu=True))
    for wrapper in (wrappers := [Settled(text) for text in texts]):
        in_use._made.add(wrapper)
    in_use.keep_recipes(folder)
    return {file.name for file in folder.glob("*")}, wrappers


def test_a_recipe_behind_a_gap_is_found(tmp_path):
    names, _ = kept_in(tmp_path, "", "b", "", "d")
    assert names == {"gradweave_recipe_1.json", "gradweave_recipe_3.json"}
    again = use_gradweave(Accelerator(cpu=True))
    again.recall_recipes(tmp_path)
    for wrapper in (wrappers := [Settled() for _ in range(5)]):
        again._made.add(wrapper)
    assert [wrapper.given for wrapper in wrappers] == [[""], ["b"], [""], ["d"], [None]]


def test_what_an_earlier_state_has_kept_goes(tmp_path):
    others = {"gradweave_recipe_01.json", "gradweave_recipe_of_mine.json", "config.json"}
    for name in others:
        (tmp_path / name).write_text("mine")
    kept_in(tmp_path, "a", "b", "c")
    names, _ = kept_in(tmp_path, "", "other")
    assert names == {"gradweave_recipe_1.json", *others}
    assert (tmp_path / "gradweave_recipe_1.json").read_text() == "other"


def test_recipes_that_cannot_be_read_are_left_alone(tmp_path, caplog):
    """All ranks give them together: none of them raises before that."""
    accelerator = Accelerator(cpu=True)
    in_use = use_gradweave(accelerator)
    in_use._made.add(prepared := Settled())
    in_use._made.recall(["an older one"])
    (tmp_path / "gradweave_recipe_0.json").write_bytes(b"\xff\xfe")
    accelerator.load_state(tmp_path)
    assert prepared.given == [None, None]
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("grad")]
    assert line.startswith("leaving recipes alone: ")
    assert "not a text file" in line


def wrapped_elsewhere(rank):
    """Who asks torch for its class while, beside and after ours is in use."""
    ours, torchs = Accelerator(cpu=True), Accelerator(cpu=True)
    in_use = use_gradweave(ours, **QUICK)
    with pytest.raises(RequestError, match="uses gradweave already"):
        use_gradweave(ours)
    mine, other = ours.prepare(network()), torchs.prepare(network())
    beside = torch.nn.parallel.DistributedDataParallel(network())
    in_use.undo()
    in_use.undo()
    afterwards = ours.prepare(network())
    with use_gradweave(ours, **QUICK) as block:
        inside = ours.prepare(network())
    assert [one.findings().stage for one in block.accounts] == ["not begun"]
    assert ours.unwrap_model(mine) is mine.module
    return [
        isinstance(model, DistributedDataParallel)
        for model in (mine, other, beside, afterwards, inside, ours.prepare(network()))
    ], torch.nn.parallel.DistributedDataParallel is TorchDDP


def test_everybody_else_keeps_torchs_class(tmp_path):
    ours = [True, False, False, False, True, False]
    assert on_two(wrapped_elsewhere, scratch=tmp_path) == [(ours, True)] * 2


def raising(rank):
    accelerator = Accelerator(cpu=True)
    use_gradweave(accelerator, plan="missing.json")
    with pytest.raises(RequestError, match=r"there is no file missing\.json"):
        accelerator.prepare(network())
    return torch.nn.parallel.DistributedDataParallel is TorchDDP


def test_a_model_that_cannot_be_wrapped_changes_nothing(tmp_path):
    assert on_two(raising, scratch=tmp_path) == [True, True]


def two_models(rank):
    """Each with a wrapper of its own, and accumulated together."""
    found = []
    for is_ours in (True, False):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with use_gradweave(accelerator, **QUICK) if is_ours else nullcontext() as in_use:
            first, second = accelerator.prepare(network(), network())
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
        optimizer = accelerator.prepare(optimizer)
        losses = []
        for batch, _ in zip(batches(rank), range(40), strict=False):
            with accelerator.accumulate(first, second):
                loss = (first(batch) * second(batch)).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        if is_ours:
            assert len(in_use.accounts) == 2
    return found


def test_two_models(tmp_path):
    for ours, torchs in on_two(two_models, scratch=tmp_path):
        assert ours == torchs

"""Sharded training is interrupted, resumed and looked into: checkpoints, evaluation, timelines."""

import pytest
import torch
from ranks import seeded
from sharded_training import (
    MADE,
    TENSORS,
    alone,
    assert_same,
    batches,
    on_ranks,
    plan,
    sharded,
    small,
)
from torch import nn


def evaluated_alone(group, twins):
    """Rank 0 looks at the model after a step, as scripts do; the others go on."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = None
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        if group.rank() == 0:
            with torch.no_grad():
                seen = model.eval()(step[0])
            model.train()
            model.state_dict()
    return seen, model.state_dict()


def test_evaluation_and_checkpoint_on_one_rank():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    results = on_ranks(2, evaluated_alone)
    for _, state in results:
        assert_same(state, expected)
    torch.testing.assert_close(results[0][0], model(batches(2)[-1][0]))


def saved(group, twins, steps):
    model = sharded(
        group, twins, small(), plan=plan(("2.bias", "2.weight"), ("0.bias", "0.weight"))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict(), model.optimizer_state_dict(optimizer)


def resumed(group, twins, kept, steps, options):
    model = sharded(group, twins, small(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(kept[0])
    model.load_optimizer_state_dict(optimizer, kept[1])
    for step in steps:
        optimizer.zero_grad()
        own = step.flatten(0, 1).chunk(group.size())[group.rank()]
        (model(own) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_resuming_is_going_on():
    everything = batches(2)
    kept = on_ranks(2, saved, everything[:2])[0]
    expected = on_ranks(2, saved, everything)[0][0]
    for state in on_ranks(2, resumed, kept, everything[2:], {"plan": MADE}):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("world", [1, 4])
def test_resuming_on_other_ranks_with_another_plan(world):
    everything = batches(4)
    kept = on_ranks(4, saved, everything[:2])[0]
    expected = on_ranks(4, saved, everything)[0][0]
    options = {"plan": MADE}
    for state in on_ranks(world, resumed, kept, everything[2:], options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_state_is_one_that_torch_loads(tmp_path):
    _, state = on_ranks(3, saved, batches(3))[1]
    torch.save(state, tmp_path / "state.pt")
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape


def convolutional(memory_format):
    made = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)))
    return made.double().to(memory_format=memory_format)


def images(world):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, world, 2, 3, 4, 4, generator=generator, dtype=torch.float64)


def convolved(group, twins, memory_format, kept, steps):
    """Trained from the beginning or from what was kept; and what is to be kept then."""
    names = [name for name, _ in convolutional(memory_format).named_parameters()]
    model = sharded(group, twins, convolutional(memory_format), plan=plan(names[2:], names[:2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kept is not None:
        model.load_state_dict(kept[0])
        model.load_optimizer_state_dict(optimizer, kept[1])
    for step in steps:
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    weight = model.module[2].weight
    is_kept = weight.is_contiguous(memory_format=memory_format)
    return model.state_dict(), model.optimizer_state_dict(optimizer), is_kept


@pytest.mark.parametrize("first", [torch.channels_last, torch.contiguous_format])
def test_memory_formats_are_kept_and_state_knows_none(first):
    """A training begins in one memory format and goes on in the other one, as on one worker."""
    second = ({torch.channels_last, torch.contiguous_format} - {first}).pop()
    model = convolutional(first)
    expected = alone(model, torch.optim.AdamW(model.parameters(), lr=0.01), images(3))
    *kept, is_kept = on_ranks(3, convolved, first, None, images(3)[:2])[1]
    assert is_kept
    for state, _, is_kept_too in on_ranks(3, convolved, second, kept, images(3)[2:]):
        assert is_kept_too
        assert_same(state, expected)


def noted(group, twins):
    model = sharded(group, twins, small(), plan=MADE, timeline=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    model.synchronise()
    return model.timelines()


def test_what_travels_is_noted_in_both_passes():
    for timelines in on_ranks(2, noted):
        assert len(timelines) == 2
        for timeline in timelines:
            messages = [span for span in timeline.spans if span.lane == "communication"]
            by = {kind: {m.tensors for m in messages if m.label.startswith(kind)} for kind in KINDS}
            assert by == {"reduce-scatter": set(TENSORS), "all-gather": set(TENSORS)}
            assert len(messages) == 2 * len(TENSORS)


KINDS = ("reduce-scatter", "all-gather")

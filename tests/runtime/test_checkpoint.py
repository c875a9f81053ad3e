"""Sparsified training that is interrupted: residuals, velocities, position in the schedule."""

import copy
import logging

import pytest
import torch
from ranks import on_processes
from torch import nn

from gradweave import FormatError, RequestError
from gradweave._src.compression import Compression
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse import checkpoint
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.warmup import Densities

NAMES = ["2.bias", "2.weight", "0.bias", "0.weight"]
TWO_BUCKETS = Plan(
    planner="made",
    buckets=tuple(
        Bucket(
            tensors=tuple(two),
            collective="native",
            compression=Compression(method="gtopk", density=0.1),
        )
        for two in (NAMES[:2], NAMES[2:])
    ),
)
WARMUP = Densities(warmup=(0.9, 0.3), final=0.1, steps_each=2)
WAYS = {
    "whole model": ({"whole_model": True}, {}),
    "two buckets": ({"dense_below": 4}, {"plan": TWO_BUCKETS}),
    "declared order": ({}, {"plan": TWO_BUCKETS, "find_unused_parameters": True}),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def take_step(wrapped, optimizer, step, rank):
    optimizer.zero_grad()
    torch.manual_seed(1000 * step + rank)
    wrapped(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


def resumed(group, way, folder):
    """Seven steps at once; then four, a checkpoint, and the other three by other objects."""
    sparse, given = WAYS[way]
    settings = GTopK(density=WARMUP, momentum=0.9, clip_norm=0.1, **sparse)
    ends = []
    for stop in (None, 4):
        model = network()
        wrapped = DistributedDataParallel(model, compression=settings, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(7):
            if step == stop:
                checkpoint.save(wrapped.sparse_state_dict(), folder)
                weights = model.state_dict()
                model = network()
                model.load_state_dict(weights)
                wrapped = DistributedDataParallel(model, compression=settings, **given)
                state = checkpoint.load(folder, rank=group.rank(), ranks=group.size())
                wrapped.load_sparse_state_dict(state)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            take_step(wrapped, optimizer, step, group.rank())
        ends.append((model.state_dict(), wrapped.sparse_state_dict()))
    (weights, state), (weights_again, state_again) = ends
    pairs = [(weights[name], weights_again[name]) for name in weights]
    for kind in ("residuals", "velocities"):
        values, again = state[kind]["values"], state_again[kind]["values"]
        assert set(values) == set(again) == set(NAMES)
        assert any(value.any() for value in values.values())
        pairs += [(values[name], again[name]) for name in values]
    return [torch.equal(*pair) for pair in pairs], state["step"], state_again["step"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_resuming_equals_an_uninterrupted_run_bit_for_bit(tmp_path, way):
    """Weights, residuals and velocities, in the middle of the warm-up.

    Also in the first step, which torch would send in one bucket.
    """
    folder = tmp_path / "checkpoint"
    for same, *steps in on_processes(2, resumed, way, folder, scratch=tmp_path):
        assert same == [True] * 12
        assert steps == [7, 7]
    assert [path.name for path in sorted(folder.iterdir())] == [
        "sparse-0-of-2.pt",
        "sparse-1-of-2.pt",
    ]


def returned(group, way, ends_with):
    """Seven steps at once; and with two more after the fourth, which are taken back."""
    sparse, given = WAYS[way]
    settings = GTopK(density=WARMUP, momentum=0.9, clip_norm=0.1, **sparse)
    ends = []
    for returns in (False, True):
        model = network()
        wrapped = DistributedDataParallel(model, compression=settings, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(7):
            if step == 4 and returns:
                kept = copy.deepcopy((model.state_dict(), wrapped.sparse_state_dict()))
                take_step(wrapped, optimizer, 40, group.rank())
                optimizer.zero_grad()
                wrapped(torch.ones(4, 6)).square().mean().backward()
                if ends_with == "a step":
                    optimizer.step()
                elif ends_with == "a skipped step":
                    optimizer.zero_grad()
                model.load_state_dict(kept[0])
                wrapped.load_sparse_state_dict(kept[1])
                told = wrapped.sparse_state_dict()
                for kind in ("residuals", "velocities"):
                    values, again = kept[1][kind]["values"], told[kind]["values"]
                    assert all(torch.equal(values[name], again[name]) for name in values)
            take_step(wrapped, optimizer, step, group.rank())
        ends.append((model.state_dict(), wrapped.sparse_state_dict()))
    (weights, state), (weights_again, state_again) = ends
    pairs = [(weights[name], weights_again[name]) for name in weights]
    for kind in ("residuals", "velocities"):
        values, again = state[kind]["values"], state_again[kind]["values"]
        pairs += [(values[name], again[name]) for name in values]
    return [torch.equal(*pair) for pair in pairs], state["step"], state_again["step"]


@pytest.mark.parametrize("ends_with", ["a step", "a skipped step", "a backward pass"])
def test_a_wrapper_that_went_on_can_return(tmp_path, ends_with):
    """Nothing is left of the steps after the state that it loads."""
    for same, *steps in on_processes(2, returned, "two buckets", ends_with, scratch=tmp_path):
        assert same == [True] * 12
        assert steps == [7, 7]


def integers(group, folder, steps, state_from=None):
    """A model whose gradients are integers: what was applied, produced, and is left."""
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = TopK(density=0.1, whole_model=True)
    wrapped = DistributedDataParallel(model, compression=settings)
    records = []
    logging.getLogger("gradweave").addHandler(handler := logging.Handler())
    handler.emit = lambda record: records.append(record.getMessage())
    if state_from is not None:
        state = checkpoint.load(state_from, rank=group.rank(), ranks=group.size())
        wrapped.load_sparse_state_dict(state)
    applied, produced = torch.zeros(40), torch.zeros(40)
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(100 * step + group.rank() + 17 * group.size())
        batch = torch.randint(-9, 10, (1, 40)).float()
        wrapped(batch).sum().backward()
        produced += batch[0]
        applied += (model.weight.grad[0] * group.size()).round()
        model.weight.data -= model.weight.grad
    state = wrapped.sparse_state_dict()
    checkpoint.save(state, folder)
    left = state["residuals"]["values"].get("weight", torch.zeros(40)).flatten()
    return *(one.tolist() for one in (applied, produced, left)), state["step"], records


def total(results, place):
    return sum(torch.tensor(result[place]) for result in results)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_loses_nothing(tmp_path, before, after):
    first, second = tmp_path / "first", tmp_path / "second"
    old = on_processes(before, integers, first, 5, scratch=tmp_path)
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    new = on_processes(after, integers, second, 4, first, scratch=tmp_path)
    applied = torch.tensor(old[0][0]) + torch.tensor(new[0][0])
    assert total(old, 2).any()
    assert torch.equal(applied + total(new, 2), total(old, 1) + total(new, 1))
    for *_, step, records in new:
        assert step == 9
        assert f"residuals of {before} ranks are redistributed among {after}" in records


def asked_often(group):
    ends = []
    for asks in (False, True):
        model = network()
        wrapped = DistributedDataParallel(
            model, compression=GTopK(density=0.1, momentum=0.5, whole_model=True)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            take_step(wrapped, optimizer, step, group.rank())
            if asks:
                wrapped.sparse_state_dict()
        ends.append(
            (*model.parameters(), *wrapped.sparse_state_dict()["residuals"]["values"].values())
        )
    return all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_asking_for_the_state_changes_nothing(tmp_path):
    assert on_processes(2, asked_often, scratch=tmp_path) == [True, True]


def complaints(group, folder):
    """One line for each way in which a state does not fit."""
    wrapped = DistributedDataParallel(network(), compression=GTopK(density=0.1, whole_model=True))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    take_step(wrapped, optimizer, 0, group.rank())
    good = wrapped.sparse_state_dict()
    smaller = DistributedDataParallel(nn.Linear(6, 9), compression=GTopK(density=0.001))
    with_momentum = DistributedDataParallel(
        network(), compression=GTopK(density=0.001, momentum=0.9)
    )
    dense = DistributedDataParallel(network())
    attempts = {
        "another model": lambda: smaller.load_sparse_state_dict(good),
        "no momentum": lambda: with_momentum.load_sparse_state_dict(good),
        "another rank": lambda: wrapped.load_sparse_state_dict({**good, "rank": 5}),
        "different steps": lambda: wrapped.load_sparse_state_dict({**good, "step": group.rank()}),
        "weights": lambda: wrapped.load_sparse_state_dict(network().state_dict()),
        "dense": dense.sparse_state_dict,
        "empty folder": lambda: checkpoint.load(folder / "none", rank=0, ranks=2),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(RequestError) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def test_states_that_do_not_fit(tmp_path):
    expected = {
        "another model": "the state has no parameter for 'weight', the model has shape (9, 6); it",
        "no momentum": "the state has no velocities, and this needs momentum; set momentum as",
        "another rank": "the state is that of rank 5 of 2, and this is rank",
        "different steps": "ranks load states of different steps, rank",
        "weights": "not a state of sparsified training as this version saves it: schema None",
        "dense": "nothing is sparsified; wrap the model with compression=GTopK(…)",
        "empty folder": "has no states; expected those of one number of ranks, such as sparse-0-of",
    }
    for found in on_processes(2, complaints, tmp_path, scratch=tmp_path):
        for name, text in found.items():
            assert expected[name] in text
            assert "\n" not in text


def one_is_wrong(group):
    """Rank 1 alone has a state that does not fit; then training goes on from where it was."""
    ends = []
    for fails in (False, True):
        model = network()
        wrapped = DistributedDataParallel(model, compression=GTopK(density=0.1, whole_model=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        take_step(wrapped, optimizer, 0, group.rank())
        if fails:
            good = wrapped.sparse_state_dict()
            wrong = {**good, "velocities": good["residuals"]}
            with pytest.raises(RequestError) as caught:
                wrapped.load_sparse_state_dict(wrong if group.rank() == 1 else good)
            with pytest.raises(RequestError):
                wrapped.load_sparse_state_dict(None if group.rank() == 1 else good)
        for step in (1, 2):
            take_step(wrapped, optimizer, step, group.rank())
        ends.append([*model.parameters()])
    return str(caught.value), all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_what_one_rank_cannot_load_none_does(tmp_path):
    why = "the state has velocities, and this needs no momentum; set momentum as where the state "
    (first, as_before), (second, as_before_too) = on_processes(2, one_is_wrong, scratch=tmp_path)
    assert first.startswith(f"rank 1 cannot load its state: {why}")
    assert second.startswith(why)
    assert as_before
    assert as_before_too


def state(rank, ranks, step=3):
    values = {"scale": 1.0, "values": {"a": torch.tensor([1.0, float(rank)])}}
    return {
        "schema": "gradweave.sparse/2",
        "rank": rank,
        "ranks": ranks,
        "step": step,
        "shapes": {"a": [2]},
        "residuals": values,
        "velocities": values,
    }


def test_files_that_do_not_fit(tmp_path):
    path = checkpoint.save(state(0, 2), tmp_path)
    with pytest.raises(RequestError, match=r"no file .*sparse-1-of-2\.pt; the checkpoint is not"):
        checkpoint.load(tmp_path, rank=1, ranks=3)
    checkpoint.save(state(1, 2, step=4), tmp_path)
    with pytest.raises(RequestError, match=r"the states are of steps \[3, 4\]; take a checkpoint"):
        checkpoint.load(tmp_path, rank=1, ranks=3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FormatError, match=r"sparse-0-of-2\.pt: not a file that torch\.save"):
        checkpoint.load(tmp_path, rank=0, ranks=2)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(FormatError, match=r"sparse-0-of-2\.pt: not a state of sparsified"):
        checkpoint.load(tmp_path, rank=0, ranks=2)
    checkpoint.save(state(0, 3), tmp_path)
    with pytest.raises(RequestError, match=r"has states of \[2, 3\] ranks; expected those of one"):
        checkpoint.load(tmp_path, rank=0, ranks=2)


def test_an_interrupted_write_leaves_the_file_that_was_there(tmp_path):
    path = checkpoint.save(state(0, 1), tmp_path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save({**state(0, 1), "step": lambda: None}, tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_velocities_keep_their_mean(tmp_path):
    for rank in range(2):
        checkpoint.save(state(rank, 2), tmp_path)
    new = [checkpoint.load(tmp_path, rank=rank, ranks=3) for rank in range(3)]
    velocities = [one["velocities"]["values"].get("a", torch.zeros(2)) for one in new]
    assert (sum(velocities) / 3).tolist() == [1.0, 0.5]
    assert [one["rank"] for one in new] == [0, 1, 2]

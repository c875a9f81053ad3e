"""What is carried over: keyed by parameter, a transaction, and never lost."""

import io

import pytest
import torch

from gradweave._src.errors import RequestError
from gradweave._src.sparse.residual import Carried, carried_type, share_of

SIZES = {"a": 2, "b": 3, "c": 1}


def carried(sizes=SIZES, dtype=torch.float32):
    return Carried({name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()})


def step(state, names, value, *, commit=True):
    """kept + value in every element of the bucket."""
    flat = state.begin(names)
    torch.add(flat.kept, value, out=flat.pending)
    if commit:
        state.commit()
    return flat


def values(state):
    return {name: state.value(name).tolist() for name in SIZES}


def test_a_committed_step_holds_and_a_skipped_one_leaves_every_bit():
    state = carried()
    step(state, ["a", "b"], 0.1)
    before = {name: state.value(name).clone() for name in SIZES}
    flat = step(state, ["a", "b"], 1e30, commit=False)
    flat.pending[0] = torch.nan
    state.rollback()
    assert all(torch.equal(state.value(name), before[name]) for name in SIZES)
    step(state, ["a", "b"], 1.0)
    assert values(state)["b"] == pytest.approx([1.1] * 3)


def test_all_buckets_of_a_step_or_none():
    state = carried()
    step(state, ["a"], 1.0, commit=False)
    step(state, ["b"], 2.0, commit=False).finite = False
    assert state.commit() is False
    assert values(state) == {"a": [0, 0], "b": [0, 0, 0], "c": [0]}
    step(state, ["a"], 1.0, commit=False)
    step(state, ["b"], 2.0, commit=False)
    assert state.commit() is True
    assert values(state) == {"a": [1, 1], "b": [2, 2, 2], "c": [0]}


def test_new_buckets_keep_what_belongs_to_each_parameter():
    state = carried()
    step(state, ["a", "b"], 1.0, commit=False)
    step(state, ["c"], 2.0)
    step(state, ["c", "a"], 10.0)  # b is left alone
    assert values(state) == {"a": [11, 11], "b": [1, 1, 1], "c": [12]}
    step(state, ["b", "a", "c"], 100.0)
    assert values(state) == {"a": [111, 111], "b": [101, 101, 101], "c": [112]}
    assert state.begin(["b", "a", "c"]).kept.tolist() == [101, 101, 101, 111, 111, 112]


def test_a_new_layout_alone_changes_nothing():
    state = carried()
    step(state, ["a", "b"], 1.0)
    state.begin(["b", "c"])
    state.rollback()
    assert values(state) == {"a": [1, 1], "b": [1, 1, 1], "c": [0]}


def test_discarded_parameters_are_rolled_back_alone():
    state = carried()
    step(state, ["a", "b"], 1.0)
    step(state, ["a", "b"], 10.0, commit=False)
    told = state.state_dict(discarded={"b"})["values"]
    assert state.commit(discarded={"b"})
    assert values(state) == {"a": [11, 11], "b": [1, 1, 1], "c": [0]}
    assert {name: value.tolist() for name, value in told.items()} == values(state)


@pytest.mark.parametrize("how", ["discarded", "rolled back", "not finite", "applied"])
def test_what_waits_is_discarded_with_what_was_added(how):
    """Through another layout and another scale."""
    state = carried()
    step(state, ["a", "b"], 1.0)
    step(state, ["a", "b"], 10.0, commit=False)
    state.commit(waiting={"a", "b"})
    assert values(state) == {"a": [11, 11], "b": [11, 11, 11], "c": [0]}
    state.follow_scale(2.0)
    flat = step(state, ["b", "c", "a"], 100.0, commit=False)
    if how == "rolled back":
        state.rollback()
    else:
        flat.finite = how != "not finite"
        state.commit(discarded={"a", "b", "c"} if how == "discarded" else ())
    before = {"a": [2, 2], "b": [2, 2, 2], "c": [0]}
    after = {"a": [122, 122], "b": [122, 122, 122], "c": [100]}
    assert values(state) == (after if how == "applied" else before)
    step(state, ["a", "b", "c"], 1.0, commit=False)
    state.rollback()
    assert values(state) == (after if how == "applied" else before)


def test_an_empty_bucket():
    state = carried()
    assert state.begin([]).pending.numel() == 0
    assert state.commit()


def test_a_bucket_cannot_be_begun_twice_in_a_step():
    state = carried()
    state.begin(["a", "b"])
    with pytest.raises(RequestError, match="'b' has been begun; commit the step or roll it back"):
        state.begin(["c", "b"])
    with pytest.raises(RequestError, match="no parameter 'z'"):
        state.begin(["z"])
    for act in (state.state_dict, lambda: state.follow_scale(2.0)):
        with pytest.raises(RequestError, match="a step is open; commit it or roll it back first"):
            act()


def test_parameters_of_one_bucket_are_of_one_kind():
    state = Carried({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(RequestError, match="several kinds"):
        state.begin(["a", "b"])


def test_residuals_are_at_least_float32():
    for low in (torch.float16, torch.bfloat16, torch.float32):
        assert carried_type(low) == torch.float32
        assert carried(dtype=low).begin(["a"]).kept.dtype == torch.float32
    assert carried_type(torch.float64) == torch.float64


def test_residuals_follow_the_loss_scale():
    state = carried()
    state.follow_scale(2.0**16)
    step(state, ["a", "b"], 3.0)
    state.follow_scale(2.0**15)
    assert values(state)["a"] == [1.5, 1.5]
    state.follow_scale(2.0**15)
    state.follow_scale(2.0**17)
    assert values(state)["b"] == [6.0] * 3
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="a loss scale must be positive and finite"):
            state.follow_scale(scale)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_goes_through_a_file_of_plain_tensors():
    state = carried()
    state.follow_scale(8.0)
    step(state, ["b", "a"], 1.5)
    saved = through_a_file(state.state_dict())
    step(state, ["b", "a"], 5.0)  # what was saved does not change with it
    other = carried()
    other.load_state_dict(saved)
    assert values(other) == {"a": [1.5] * 2, "b": [1.5] * 3, "c": [0]}
    other.follow_scale(4.0)
    assert other.begin(["a", "b", "c"]).kept.tolist() == [0.75] * 5 + [0]


def test_another_models_state_is_refused():
    state = carried({"a": 4})
    step(state, ["a"], 1.0)
    with pytest.raises(
        RequestError, match=r"shape \(4,\) for \'a\', the model has \(2,\); it is another"
    ):
        carried().load_state_dict(state.state_dict())
    state = carried({"z": 4})
    step(state, ["z"], 1.0)
    with pytest.raises(RequestError, match="the model has no such parameter"):
        carried().load_state_dict(state.state_dict())


@pytest.mark.parametrize("old", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_for_another_number_of_ranks_sums_stay(old, new):
    states = []
    for rank in range(old):
        state = carried()
        step(state, ["a", "b"], float(rank + 1))
        states.append(through_a_file(state.state_dict()))
    spread = [share_of(states, rank, new) for rank in range(new)]
    loaded = [carried() for _ in range(new)]
    for state, one in zip(loaded, spread, strict=True):
        state.load_state_dict(one)
    total = sum(range(1, old + 1))
    assert sum(state.value("a") for state in loaded).tolist() == [total] * 2
    assert sum(state.value("c") for state in loaded).tolist() == [0]
    means = [share_of(states, rank, new, mean=True) for rank in range(new)]
    mean = sum(one["values"]["b"] for one in means if one["values"]) / new
    assert mean.tolist() == pytest.approx([total / old] * 3)


def test_states_of_different_steps_are_refused():
    scaled = carried()
    scaled.follow_scale(2.0)
    with pytest.raises(RequestError, match=r"one loss scale, got \[1.0, 2.0\]"):
        share_of([carried().state_dict(), scaled.state_dict()], 0, 3)

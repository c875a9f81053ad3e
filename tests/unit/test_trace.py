import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import traces

from gradweave import RequestError, Tensor, Trace


def tensor(**changes):
    fields = {"name": "t", "elements": 1, "bytes_per_element": 4, "ready_s": 1.0, "forward_s": 0.5}
    return Tensor(**{**fields, **changes})


def trace(*tensors, batch_size=1):
    return Trace(name="made", origin="measured", source="", batch_size=batch_size, tensors=tensors)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("name", "", "name must not be empty"),
        ("elements", 0, "'t': elements must be positive, got 0"),
        ("bytes_per_element", -4, "'t': bytes_per_element must be positive, got -4"),
        ("ready_s", -1.0, "'t': ready_s must be a number >= 0, got -1.0"),
        ("ready_s", float("nan"), "'t': ready_s must be a number >= 0, got nan"),
        ("forward_s", float("inf"), "'t': forward_s must be a number >= 0, got inf"),
    ],
)
def test_tensors_that_cannot_be(field, value, complaint):
    with pytest.raises(ValueError, match=complaint):
        tensor(**{field: value})


def test_traces_that_cannot_be():
    with pytest.raises(ValueError, match="tensors must not be empty"):
        trace()
    with pytest.raises(ValueError, match="'t' stands twice"):
        trace(tensor(), tensor())
    with pytest.raises(ValueError, match=r"ready_s of 'u' is 0.5, earlier than 1.0 of 't'"):
        trace(tensor(), tensor(name="u", ready_s=0.5))
    with pytest.raises(ValueError, match="all zero; nothing is computed"):
        trace(tensor(ready_s=0.0, forward_s=0.0))
    with pytest.raises(ValueError, match="batch_size must be positive, got 0"):
        trace(tensor(), batch_size=0)


def test_totals(small_trace):
    assert small_trace.forward_s == 2.0
    assert small_trace.backward_s == 3.0
    assert small_trace.compute_s == 5.0
    assert small_trace.nbytes.tolist() == [400, 4, 1000]


def test_mixed_precision_halves_the_bytes_only(small_trace):
    half = small_trace.with_bytes_per_element(2)
    assert half.nbytes.tolist() == [200, 2, 500]
    assert half.compute_s == small_trace.compute_s


@given(made=traces(), forward_s=st.floats(0.01, 100), scale=st.floats(0.001, 10))
def test_rescaling_reaches_the_totals_asked_for(made, forward_s, scale):
    changed = made.rescaled(forward_s=forward_s, parameter_scale=scale)
    assert changed.forward_s == pytest.approx(forward_s)
    assert changed.backward_s == made.backward_s
    assert [t.name for t in changed.tensors] == [t.name for t in made.tensors]
    for before, after in zip(made.tensors, changed.tensors, strict=True):
        assert after.elements == max(1, round(before.elements * scale))


@given(
    rows=st.integers(1, 3000), columns=st.integers(1, 3000), scale=st.floats(0.001, 4).map(float)
)
def test_matrices_keep_their_proportions(rows, columns, scale):
    before = tensor(elements=rows * columns, shape=(rows, columns))
    after = before.scaled(scale)
    fewer_rows, fewer_columns = after.shape
    assert after.elements == fewer_rows * fewer_columns
    if min(after.shape) >= 20:  # rounding aside
        assert after.elements == pytest.approx(rows * columns * scale, rel=0.05)
        assert fewer_rows / fewer_columns == pytest.approx(rows / columns, rel=0.1)


def test_kernels_become_matrices_and_vectors_stay_vectors():
    kernel = tensor(elements=64 * 3 * 49, shape=(64, 3, 7, 7))
    assert kernel.scaled(0.25).shape == (32, 74)
    assert kernel.scaled(1) == kernel
    assert tensor(elements=100, shape=(100,)).scaled(0.5).shape == (50,)
    assert tensor(elements=100).scaled(0.5).shape is None


def test_a_shape_has_the_elements_that_there_are():
    with pytest.raises(ValueError, match=r"'t': shape \[2, 3\] has 6 elements, not 7"):
        tensor(elements=7, shape=(2, 3))


def test_rescaling_needs_something_to_scale():
    for ready_s in (0.0, 5e-324):
        with pytest.raises(RequestError, match=r"backward cannot be rescaled from .* s to 2.0 s"):
            trace(tensor(ready_s=ready_s)).rescaled(backward_s=2.0)
    with pytest.raises(RequestError, match="at most 1e\\+06, got 1e\\+308"):
        trace(tensor()).rescaled(parameter_scale=1e308)
    with pytest.raises(RequestError, match="forward time must be a positive number"):
        trace(tensor()).rescaled(forward_s=float("nan"))
    with pytest.raises(RequestError, match=r"parameter scale must be above 0 .* got 0"):
        trace(tensor()).rescaled(parameter_scale=0)


def test_joining_neighbours_keeps_bytes_and_times():
    made = trace(
        tensor(name="b.bias", ready_s=1.0),
        tensor(name="b.weight", ready_s=2.0, elements=5),
        tensor(name="a.weight", ready_s=3.0),
    )
    joined = made.joined(lambda name: name.split(".")[0])
    assert [t.name for t in joined.tensors] == ["b", "a"]
    assert [t.ready_s for t in joined.tensors] == [2.0, 3.0]
    assert [t.elements for t in joined.tensors] == [6, 1]
    assert joined.forward_s == made.forward_s


def test_joining_different_widths_is_refused():
    mixed = trace(tensor(name="a.x"), tensor(name="a.y", bytes_per_element=2))
    with pytest.raises(ValueError, match=r"'a' joins tensors of \[2, 4\] bytes each"):
        mixed.joined(lambda name: name.split(".")[0])

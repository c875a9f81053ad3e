"""Selection: exactly the k largest, fused with the sum, never touching what was kept."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lockstep import bits
from ranks import on_threads

from gradweave._src.errors import RequestError
from gradweave._src.sparse import kernels, threshold, vectors
from gradweave._src.sparse.residual import Flat
from gradweave._src.sparse.select import (
    SELECTIONS,
    compile_kernels,
    default_selection,
    select,
    warn_of_slow_selection,
)
from gradweave._src.sparse.settings import GTopK, settings_of
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.sparse.vectors import elements_kept

EXACT = ("radix", "threshold", "torch-topk")
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

# Ties, both zeros, numbers below the smallest normal one, and numbers apart by one bit.
AWKWARD = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-39, 1.0000001, -1.0000001, 3e38, -3e38, 2.0]


def flat(kept):
    return Flat((), kept, torch.full_like(kept, torch.nan))


def oracle(total, k):
    """Indices of the k largest: a stable sort keeps equal magnitudes in the order of indices."""
    return np.sort(np.argsort(-np.abs(total), kind="stable")[:k])


def check_exact(method, kept, gradient, k):
    """Returns nothing: everything that a selection promises is asserted."""
    before, state = kept.clone(), flat(kept)
    total = kept.numpy() + gradient.to(kept.dtype).numpy()
    chosen = select(state, gradient, k=k, method=method)
    expected = oracle(total, k)
    assert chosen.finite
    assert chosen.indices.tolist() == expected.tolist()
    assert chosen.values.tobytes() == total[expected].tobytes()
    left = total.copy()
    left[expected] = 0
    assert state.pending.numpy().tobytes() == left.tobytes()
    assert state.kept.numpy().tobytes() == before.numpy().tobytes()


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("dtype", NUMPY)
@given(data=st.data())
def test_the_k_largest_and_of_equals_the_first(method, dtype, data):
    numbers = st.one_of(st.sampled_from(AWKWARD), st.integers(-3, 3).map(float))
    values = data.draw(st.lists(numbers, min_size=1, max_size=200))
    k = data.draw(st.integers(1, len(values)))
    kept = torch.tensor(values, dtype=dtype)
    check_exact(method, kept, torch.zeros_like(kept), k)


@pytest.mark.parametrize("method", EXACT)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), share=st.floats(0, 1))
def test_any_bit_pattern_of_a_number(method, bits, share):
    numbers = np.array(bits, np.uint32).view(np.float32)
    kept = torch.from_numpy(np.where(np.isfinite(numbers), numbers, np.float32(0)))
    check_exact(method, kept, torch.zeros_like(kept), max(1, round(share * len(bits))))


ORDERS = {
    "random": lambda n: np.random.default_rng(0).standard_normal(n),
    "ascending": np.arange,
    "descending": lambda n: -np.arange(n)[::-1],
    "all equal": np.ones,
    "all zero": np.zeros,
    "few levels": lambda n: np.random.default_rng(1).integers(-4, 4, n),
    "one bit larger": lambda n: (100 + (np.arange(n) == n - 1)).astype(np.uint32).view(np.float32),
    # What the sample does not see: all that is large lies between its runs, or only in them.
    "misleading": lambda n: np.where(np.arange(n) % (n // 512) < 64, 0, np.arange(n) % 97),
    "misleading the other way": lambda n: np.where(np.arange(n) % (n // 512) < 64, 5, 0),
}


@pytest.mark.parametrize("method", ["radix", "threshold"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("density", [0.001, 0.05, pytest.param(0.25, marks=pytest.mark.long), 1.0])
def test_large_vectors_in_every_order(method, order, density):
    """Large enough for a sample and for a buffer that is cut down several times."""
    numel = 300_007
    gradient = torch.from_numpy(ORDERS[order](numel).astype(np.float32))
    check_exact(method, torch.zeros(numel), gradient, elements_kept(numel, density))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("numel", [threshold.SAMPLE, threshold.SAMPLE + 1, 100_003])
def test_whichever_way_a_threshold_is_found_the_result_is_the_same(numel, dtype, monkeypatch):
    """All elements sorted, those above a floor, or bit by bit; with a floor that is missed."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for k in (1, numel // 1000, numel // 2):
        check_exact("threshold", torch.zeros_like(gradient), gradient, k)
        for above in (1, 10**6):
            with monkeypatch.context() as patched:
                patched.setattr(threshold, "LEAST_SAMPLED_ABOVE", above)
                check_exact("threshold", torch.zeros_like(gradient), gradient, k)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_gradients_of_lower_precision_are_added_in_float32(method, dtype, numel):
    torch.manual_seed(numel)
    kept, gradient = torch.randn(numel), torch.randn(numel).to(dtype)
    for k in {1, max(1, numel // 10), numel}:
        check_exact(method, kept, gradient, k)


@pytest.mark.parametrize("method", SELECTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_what_is_not_finite_is_reported_and_kept_out(method, bad, place):
    state = flat(torch.arange(1000.0))
    gradient = torch.ones(1000)
    gradient[place] = bad
    chosen = select(state, gradient, k=10, method=method)
    assert not chosen.finite
    assert len(chosen) == 0
    assert torch.equal(state.kept, torch.arange(1000.0))


@pytest.mark.parametrize("method", SELECTIONS)
def test_a_sum_that_overflows_is_not_finite(method):
    state = flat(torch.full((10,), 3e38))
    assert not select(state, torch.full((10,), 3e38), k=2, method=method).finite


@pytest.mark.parametrize("method", ["sampled", "gaussian"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_estimates_take_about_k_and_nothing_is_lost(method, density):
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(100_000, generator=generator)
    k = elements_kept(100_000, density)
    state = flat(torch.zeros(100_000))
    chosen = select(state, gradient, k=k, method=method)
    assert k / 2 <= len(chosen) <= k
    whole = state.pending.clone()
    whole[torch.from_numpy(chosen.indices)] += torch.from_numpy(chosen.values)
    assert torch.equal(whole, gradient)
    assert float(state.pending.abs().max()) <= float(np.abs(chosen.values).min()) or len(chosen) < k


@pytest.mark.parametrize("method", ["sampled", "gaussian"])
@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=50), data=st.data())
@example(values=[0], data=None)
def test_estimates_take_at_most_k_of_anything(method, values, data):
    k = data.draw(st.integers(1, len(values))) if data else 1
    gradient = torch.tensor(values, dtype=torch.float32)
    state = flat(torch.zeros(len(values)))
    chosen = select(state, gradient, k=k, method=method)
    assert len(chosen) <= k
    whole = state.pending.clone()
    whole[torch.from_numpy(chosen.indices)] += torch.from_numpy(chosen.values)
    assert torch.equal(whole, gradient)


@pytest.mark.parametrize("method", SELECTIONS)
def test_k_is_cut_to_what_there_is(method):
    state = flat(torch.tensor([1.0, -2.0]))
    chosen = select(state, torch.zeros(2), k=5, method=method)
    assert (chosen.indices.tolist(), chosen.values.tolist()) == ([0, 1], [1.0, -2.0])
    empty = select(flat(torch.empty(0)), torch.empty(0), k=5, method=method)
    assert (len(empty), empty.finite) == (0, True)
    nothing = select(state, torch.ones(2), k=0, method=method)
    assert (len(nothing), state.pending.tolist()) == (0, [2.0, -1.0])


def test_of_how_many_elements_a_share_is_kept():
    assert elements_kept(25_557_032, 0.001) == 25_557
    assert elements_kept(10, 0.001) == 1
    assert elements_kept(10, 1.0) == 10
    assert elements_kept(0, 0.5) == 0
    for density in (0.0, -0.1, 1.01, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="density must be above 0 and at most 1"):
            elements_kept(10, density)


def test_what_cannot_be_selected_from():
    state = flat(torch.zeros(3))
    with pytest.raises(RequestError, match="no selection 'magic'; there are radix, threshold"):
        select(state, torch.zeros(3), k=1, method="magic")
    with pytest.raises(RequestError, match="sparse tensor already"):
        select(state, torch.zeros(3).to_sparse(), k=1, method="radix")
    with pytest.raises(ValueError, match="flat and contiguous with 3 elements"):
        select(state, torch.zeros(4), k=1, method="radix")
    with pytest.raises(RequestError, match="k must not be negative"):
        select(state, torch.zeros(3), k=-1, method="radix")


def test_without_numba_torch_selects(monkeypatch):
    assert default_selection(torch.device("cpu")) == "radix"
    assert default_selection(torch.device("cuda")) == "threshold"
    monkeypatch.setattr("gradweave._src.sparse.select.kernels", lambda: None)
    assert default_selection(torch.device("cpu")) == "torch-topk"
    compile_kernels(torch.float32)
    complaint = r"radix needs numba, which is not installed; pip install 'gradweave\[sparse\]', or"
    with pytest.raises(RequestError, match=complaint):
        select(flat(torch.zeros(3)), torch.zeros(3), k=1, method="radix")
    with pytest.raises(RequestError, match=complaint):
        settings_of(GTopK(0.1, selection="radix"))  # as wrappers do, before the first step
    assert settings_of(GTopK(0.1, selection="torch-topk")).selection == "torch-topk"


def sparsified(group):
    warn_of_slow_selection.cache_clear()
    for _ in range(2):
        SparseTraining(GTopK(0.1), {"a": torch.nn.Parameter(torch.zeros(3))}, group)


def test_slow_selection_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("gradweave._src.sparse.select.kernels", lambda: None)
    on_threads(1, sparsified)
    (record,) = caplog.records
    assert record.getMessage() == (
        "largest elements are found by torch, which takes 20 to 30 times as long; "
        "pip install 'gradweave[sparse]'"
    )


def test_all_exact_ones_give_the_same_bits():
    kept, gradient = torch.randn(5000), torch.randn(5000)
    states = [flat(kept) for _ in EXACT]
    first, *others = (
        select(state, gradient, k=50, method=method)
        for state, method in zip(states, EXACT, strict=True)
    )
    assert {bits(other) for other in others} == {bits(first)}
    assert all(torch.equal(state.pending, states[0].pending) for state in states)


def test_compiled_ahead_nothing_is_compiled_later():
    compile_kernels(torch.float32)
    compiled = len(kernels.take_largest.signatures), len(kernels.add_sparse.signatures)
    chosen = select(flat(torch.zeros(100)), torch.randn(100), k=10, method="radix")
    vectors.part_largest(vectors.add(chosen, chosen), 5)
    assert (len(kernels.take_largest.signatures), len(kernels.add_sparse.signatures)) == compiled

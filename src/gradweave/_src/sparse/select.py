"""Which elements travel: those of largest magnitude in residual + gradient.

A selection writes kept + gradient into ``pending``, takes at most k elements out of it, and returns
them. Where the sum is not finite somewhere, it says so and ``pending`` means nothing; ``kept`` is
never touched.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from math import ceil
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradweave._src.comm.staging import HostCopy
from gradweave._src.errors import RequestError
from gradweave._src.sparse.residual import Flat, carried_type
from gradweave._src.sparse.threshold import take_by_threshold
from gradweave._src.sparse.vectors import (
    SparseVector,
    add,
    empty,
    index_type,
    kernels,
    part_by,
    part_largest,
    radix_passes,
)
from gradweave._src.torch_internals import HOST
from gradweave._src.vocabulary import alternatives

logger = logging.getLogger(__name__)

Select = Callable[[Flat, torch.Tensor, int], SparseVector]

NO_RADIX = (
    "selection by radix needs numba, which is not installed; pip install 'gradweave[sparse]', or "
    "use torch-topk"
)

# A buffer for radix has room for at least so many elements beyond k.
LEAST_SPARE = 1 << 16

# A threshold is estimated from this share of the elements, unless too few of them would be above.
SAMPLED_SHARE = 0.01
LEAST_SAMPLED_ABOVE = 64

# How often a Gaussian estimate is corrected, and which counts, as shares of k, are close enough.
CORRECTIONS = 4
CLOSE_ENOUGH = (2 / 3, 4 / 3)


def radix(flat: Flat, gradient: torch.Tensor, k: int) -> SparseVector:
    """Select exactly the k largest, in one pass over memory; on the CPU, with numba."""
    fast = kernels()
    if fast is None:
        raise RequestError(NO_RADIX)
    if flat.pending.device.type != "cpu":
        raise RequestError(f"radix works on the CPU, not on {flat.pending.device}; use threshold")
    pending = flat.pending.numpy()
    bits = pending.view(f"u{pending.itemsize}")
    buffer = _buffer(pending, k)
    terms: tuple[NDArray[Any] | None, NDArray[Any] | None] = (None, None)
    if gradient.dtype == flat.kept.dtype:
        terms = flat.kept.numpy(), gradient.detach().numpy()
    else:
        _add(flat, gradient)
    highest = fast.take_largest(*terms, pending, bits, k, buffer)
    if highest >= np.array(np.inf, pending.dtype).view(bits.dtype):
        return _nothing(flat, finite=False)
    return SparseVector(buffer.indices[:k], buffer.values[:k])


def threshold(flat: Flat, gradient: torch.Tensor, k: int) -> SparseVector:
    """Select exactly the k largest by a threshold found on the device; only they leave it."""
    return take_by_threshold(lambda: _add(flat, gradient), k)


def torch_topk(flat: Flat, gradient: torch.Tensor, k: int) -> SparseVector:
    """Select exactly the k largest by ``torch.topk``, on any device."""
    magnitudes = _add(flat, gradient).abs()
    ranked = torch.topk(magnitudes, min(k + 1, len(magnitudes)))
    if not torch.isfinite(ranked.values[0]):  # NaN ranks above everything
        return _nothing(flat, finite=False)
    return _take(flat, _first(ranked, magnitudes, k))


def sampled(flat: Flat, gradient: torch.Tensor, k: int) -> SparseVector:
    """Select at most k above a threshold that a hundredth of the elements suggests (like DGC)."""
    magnitudes = _add(flat, gradient).abs()
    numel = len(magnitudes)
    wanted = max(ceil(SAMPLED_SHARE * numel), ceil(LEAST_SAMPLED_ABOVE * numel / k))
    sample = magnitudes[:: max(1, numel // wanted)]
    above = max(1, round(k / numel * len(sample)))
    return _above(flat, magnitudes, torch.topk(sample, above).values[-1], k)


def gaussian(flat: Flat, gradient: torch.Tensor, k: int) -> SparseVector:
    """Select at most k above a threshold for normally distributed numbers (Gaussian-k)."""
    magnitudes = _add(flat, gradient).abs()
    deviation, mean = torch.std_mean(flat.pending, correction=0)
    share = k / len(magnitudes)
    quantile = NormalDist().inv_cdf(1 - share / 2) if share < 1 else 0.0
    threshold = mean.abs() + deviation * quantile
    fewest, most = (share_of_k * k for share_of_k in CLOSE_ENOUGH)
    for _ in range(CORRECTIONS):
        above = int(torch.count_nonzero(magnitudes >= threshold))
        if fewest <= above <= most:
            break
        threshold = threshold * (0.5 if above < fewest else 1.5)
    return _above(flat, magnitudes, threshold, k)


SELECTIONS: Mapping[str, Select] = {
    "radix": radix,
    "threshold": threshold,
    "torch-topk": torch_topk,
    "sampled": sampled,
    "gaussian": gaussian,
}


def check_selection(name: str) -> None:
    """Raise RequestError unless there is such a selection, and what it needs is installed."""
    find_selection(name)
    if name == "radix" and kernels() is None:
        raise RequestError(NO_RADIX)


def find_selection(name: str) -> Select:
    if name not in SELECTIONS:
        raise RequestError(f"no selection {name!r}{alternatives(name, SELECTIONS)}")
    return SELECTIONS[name]


def select(flat: Flat, gradient: torch.Tensor, *, k: int, method: str) -> SparseVector:
    """Select by the method of this name; a k above the number of elements takes them all."""
    chosen = find_selection(method)
    if gradient.layout is not torch.strided:
        raise RequestError(
            "the gradient is a sparse tensor already; use sparse=False in the embedding, or leave "
            "that parameter out of compression"
        )
    if gradient.shape != flat.kept.shape or not gradient.is_contiguous():
        raise ValueError(
            f"gradient must be flat and contiguous with {flat.kept.numel()} elements, got shape "
            f"{tuple(gradient.shape)}"
        )
    if k < 0:
        raise RequestError(f"k must not be negative, got {k}")
    with torch.no_grad():
        if 0 < k < gradient.numel():
            return chosen(flat, gradient, k)
        if not HostCopy(torch.isfinite(_add(flat, gradient)).all()).read():
            return _nothing(flat, finite=False)
        return _take(flat, torch.arange(min(k, gradient.numel()), device=gradient.device))


def default_selection(device: torch.device) -> str:
    """Return the name of the fastest exact selection for this device."""
    if device.type != "cpu":
        return "threshold"
    return "radix" if kernels() else "torch-topk"


@cache
def warn_of_slow_selection() -> None:
    """Log once that exact selection on CPUs goes without numba."""
    logger.warning(
        "largest elements are found by torch, which takes 20 to 30 times as long; "
        "pip install 'gradweave[sparse]'"
    )


def compile_kernels(gradient: torch.dtype) -> None:
    """Compile what radix and exchanges run for gradients of this type, or load it from the cache.

    Takes two to five seconds the first time, so better before the first step. Needs no numba, but
    does nothing without it.
    """
    if kernels():
        kind = carried_type(gradient)
        kept, pending = (torch.zeros(2, dtype=kind, device=HOST) for _ in range(2))
        first, second = torch.eye(2, dtype=gradient, device=HOST)
        one = select(Flat((), kept, pending), first, k=1, method="radix")
        other = select(Flat((), kept, pending), second, k=1, method="radix")
        part_by(one, part_largest(add(one, other), 1).outside.indices)


def _buffer(pending: NDArray[Any], k: int) -> Any:
    """Return a buffer for candidates.

    Larger ones are cut down less often; much larger ones no longer fit into the cache.
    """
    fast = kernels()
    room = min(len(pending), k + max(k // 2, LEAST_SPARE)) + fast.CHUNK
    values = np.empty(room, pending.dtype)
    bits = values.view(f"u{pending.itemsize}")
    return fast.Buffer(
        np.empty(room, index_type(len(pending))), values, bits, *radix_passes(room, bits.itemsize)
    )


def _add(flat: Flat, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dtype == flat.kept.dtype:
        return torch.add(flat.kept, gradient, out=flat.pending)
    return flat.pending.copy_(gradient).add_(flat.kept)  # three times as fast as mixed types


def _above(flat: Flat, magnitudes: torch.Tensor, threshold: torch.Tensor, k: int) -> SparseVector:
    """Take out the k largest of those that reach the threshold, or all of them."""
    if not torch.isfinite(magnitudes.max()):
        return _nothing(flat, finite=False)
    indices = torch.nonzero(magnitudes >= threshold).view(-1)
    if len(indices) > k:
        found = magnitudes[indices]
        indices = indices[_first(torch.topk(found, k + 1), found, k)]
    return _take(flat, indices)


def _first(ranked: torch.return_types.topk, magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """Return ascending indices of the k largest, from k + 1 that were ranked if there are as many.

    torch.topk does not say which of equals it takes; the one more shows whether that matters.
    """
    if len(ranked.values) <= k or ranked.values[k] < ranked.values[k - 1]:
        return ranked.indices[:k].sort().values
    above = torch.nonzero(magnitudes > ranked.values[k]).view(-1)
    ties = torch.nonzero(magnitudes == ranked.values[k]).view(-1)
    return torch.cat([above, ties[: k - len(above)]]).sort().values


def _take(flat: Flat, indices: torch.Tensor) -> SparseVector:
    values = flat.pending[indices]
    flat.pending[indices] = 0
    kind = index_type(len(flat.pending))
    of_indices, of_values = HostCopy(indices), HostCopy(values)
    return SparseVector(of_indices.read().numpy().astype(kind), of_values.read().numpy())


def _nothing(flat: Flat, *, finite: bool = True) -> SparseVector:
    kind = torch.empty(0, dtype=flat.kept.dtype, device=HOST).numpy().dtype
    return empty(kind, index_type(flat.kept.numel()), finite=finite)

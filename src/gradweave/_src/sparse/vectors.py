"""Sparse vectors and what exchanges do with them. Numpy alone, faster where numba is installed.

Every operation gives the same bits with and without numba, and whichever of two vectors comes
first: two numbers have one sum, and of equal magnitudes the one with the smaller index wins.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradweave._src.errors import RequestError

Array = NDArray[Any]

# By how many bits at once magnitudes are told apart: for many elements fewer passes pay.
MANY = 1 << 18
BITS_OF_FEW, BITS_OF_MANY = 11, 16


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Some elements of a flat vector; all others are zero.

    A vector that is not ``finite`` stands for one with NaN or Inf somewhere. It has no elements,
    and neither has whatever is made from it.
    """

    indices: Array  # ascending, each at most once; int32 where that is enough
    values: Array
    finite: bool = True

    def __len__(self) -> int:
        return len(self.indices)


class Parted(NamedTuple):
    """One vector as two: together they are what it was."""

    inside: SparseVector
    outside: SparseVector


def index_type(numel: int) -> np.dtype[Any]:
    """Return the type for indices of so many elements: 32 bits where they are enough."""
    return np.dtype(np.int32 if numel <= 2**31 else np.int64)


def empty(values: DTypeLike, indices: DTypeLike, *, finite: bool = True) -> SparseVector:
    return SparseVector(np.empty(0, indices), np.empty(0, values), finite)


def like(vector: SparseVector, *, finite: bool = True) -> SparseVector:
    """Return an empty vector of the same types."""
    return empty(vector.values.dtype, vector.indices.dtype, finite=finite)


def elements_kept(numel: int, density: float) -> int:
    """Return k for that many elements: at least one, unless there is none."""
    if not 0 < density <= 1:  # NaN is neither
        raise RequestError(f"density must be above 0 and at most 1, got {density}")
    return min(numel, max(1, round(density * numel)))


def add(first: SparseVector, second: SparseVector) -> SparseVector:
    if not (first.finite and second.finite):
        return like(first, finite=False)
    indices = np.empty(len(first) + len(second), first.indices.dtype)
    values = np.empty(len(indices), first.values.dtype)
    fast = kernels()
    if fast:
        count = fast.add_sparse(
            first.indices, first.values, second.indices, second.values, indices, values
        )
    else:
        count = _add(first, second, indices, values)
    if not np.isfinite(values[:count]).all():
        return like(first, finite=False)
    return SparseVector(indices[:count], values[:count])


def add_all(vectors: list[SparseVector]) -> SparseVector:
    """Return the sum of at least one vector, pair by pair in the given order."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        rest = vectors[-1:] if len(vectors) % 2 else []
        vectors = [add(first, second) for first, second in pairs] + rest
    return vectors[0]


def part_largest(vector: SparseVector, k: int) -> Parted:
    """Split off the k elements of largest magnitude; between equals the smaller index wins."""
    if len(vector) <= k:
        return Parted(vector, like(vector))
    fast = kernels()
    if not fast or not k:
        chosen = np.zeros(len(vector), np.bool_)
        chosen[np.argsort(-np.abs(vector.values), kind="stable")[:k]] = True
        return _parted(vector, chosen)
    bits = vector.values.view(f"u{vector.values.itemsize}")
    counts, shifts = radix_passes(len(bits), bits.itemsize)
    parts = _room(vector)
    fast.part_largest(vector.indices, vector.values, bits, k, counts, shifts, parts)
    return _filled(parts, k, len(vector))


def part_by(vector: SparseVector, indices: Array) -> Parted:
    """Part elements whose index is among ``indices``, which ascend, from the others."""
    fast = kernels()
    if fast:
        parts = _room(vector)
        inside = fast.part_by(vector.indices, vector.values, indices, parts)
        return _filled(parts, inside, len(vector))
    return _parted(vector, np.isin(vector.indices, indices, assume_unique=True))


def radix_passes(numel: int, itemsize: int) -> tuple[Array, Array]:
    """Return room for counts, and the lowest bit of each pass (``kernels.find_threshold``)."""
    width = BITS_OF_MANY if numel > MANY else BITS_OF_FEW
    without_sign = 8 * itemsize - 1
    shifts = np.array([*range(without_sign - width, 0, -width), 0])
    return np.empty(1 << width, np.int64), shifts


@cache
def kernels() -> Any:
    """Import the compiled loops when they are first needed; None without numba."""
    return import_module("gradweave._src.sparse.kernels") if find_spec("numba") else None


# How many elements there are, or that the vector is not finite. Messages are multiples of its size,
# and the wider of values and indices comes first, so that everything is aligned.
HEADER = np.dtype(np.int64)
NOT_FINITE = -1


def message_bytes(k: int, values: DTypeLike, indices: DTypeLike) -> int:
    """Return the bytes of a message that k elements fit into: a count, values, indices."""
    elements = k * (np.dtype(values).itemsize + np.dtype(indices).itemsize)
    return HEADER.itemsize * (1 + -(-elements // HEADER.itemsize))


def pack(vector: SparseVector, message: NDArray[np.uint8]) -> None:
    count = len(vector) if vector.finite else NOT_FINITE
    message[: HEADER.itemsize].view(HEADER)[0] = count
    values, indices = _places(len(vector), vector.values.dtype, vector.indices.dtype)
    message[values] = vector.values.view(np.uint8)
    message[indices] = vector.indices.view(np.uint8)


def unpack(message: NDArray[np.uint8], values: DTypeLike, indices: DTypeLike) -> SparseVector:
    """Return the vector in a message, as a view of it."""
    count = int(message[: HEADER.itemsize].view(HEADER)[0])
    if count == NOT_FINITE:
        return empty(values, indices, finite=False)
    of_values, of_indices = _places(count, values, indices)
    return SparseVector(message[of_indices].view(indices), message[of_values].view(values))


def _places(count: int, values: DTypeLike, indices: DTypeLike) -> tuple[slice, slice]:
    value_bytes, index_bytes = (count * np.dtype(kind).itemsize for kind in (values, indices))
    first = HEADER.itemsize
    if value_bytes < index_bytes:
        middle, last = first + index_bytes, first + index_bytes + value_bytes
        return slice(middle, last), slice(first, middle)
    middle, last = first + value_bytes, first + value_bytes + index_bytes
    return slice(first, middle), slice(middle, last)


def _parted(vector: SparseVector, chosen: NDArray[np.bool_]) -> Parted:
    return Parted(
        SparseVector(vector.indices[chosen], vector.values[chosen]),
        SparseVector(vector.indices[~chosen], vector.values[~chosen]),
    )


def _room(vector: SparseVector) -> Any:
    room, kinds = len(vector) + 1, (vector.indices.dtype, vector.values.dtype)
    return kernels().Parts(*(np.empty(room, kind) for kind in (*kinds, *kinds)))


def _filled(parts: Any, inside: int, count: int) -> Parted:
    return Parted(
        SparseVector(parts.inside_indices[:inside], parts.inside_values[:inside]),
        SparseVector(
            parts.outside_indices[: count - inside], parts.outside_values[: count - inside]
        ),
    )


def _add(first: SparseVector, second: SparseVector, indices: Array, values: Array) -> int:
    """Do what ``add_sparse`` does. An index occurs twice at most."""
    both = np.concatenate([first.indices, second.indices])
    order = np.argsort(both, kind="stable")
    both, numbers = both[order], np.concatenate([first.values, second.values])[order]
    starts = np.flatnonzero(np.diff(both, prepend=-1))
    twice = np.diff(starts, append=len(both)) > 1
    count = len(starts)
    indices[:count], values[:count] = both[starts], numbers[starts]
    with np.errstate(over="ignore"):  # the caller looks for Inf
        values[:count][twice] += numbers[starts[twice] + 1]
    return count

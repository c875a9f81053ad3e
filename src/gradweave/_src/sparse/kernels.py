"""Compiled loops: exact selection by radix, and sums of sparse vectors. They need numba.

Magnitudes are compared as bit patterns: without the sign bit, those of IEEE numbers are ordered
like the numbers, Inf and NaN above all others.

Note: selection by radix
    One pass over memory adds gradient and residual, and puts what may be among the k largest into a
    buffer: what reaches a floor. When the buffer is full, it is cut down to its k largest, and from
    then on only what is larger than the smallest of these can matter; a chunk of which nothing does
    is passed over with one comparison. Cutting down counts magnitudes by their upper bits, which
    tells the upper bits of the k-th largest, then by the next ones among those that share them, and
    so on. The first floor is guessed from a sample, to save cutting down. Where it was too high,
    fewer than k are found, and a second pass starts from zero: the result never depends on it.
    The buffer keeps the order of indices, and later ones must be larger, not equal, to get in. So
    the smaller index wins a tie, and nothing is ever sorted.
"""

# ruff: noqa: PLR0917 compiled functions take arrays, and positional arguments only

from typing import Any, NamedTuple

from numpy.typing import NDArray

from gradweave._src.comm.compiled import compiled

CHUNK = 64  # elements that are looked at by their largest magnitude first
SAMPLE = 1 << 15
LEAST_SAMPLED_ABOVE = 16  # fewer say little

Array = NDArray[Any]


@compiled
def find_threshold(bits: Array, k: int, counts: Array, shifts: Array) -> tuple[Any, int]:
    """Return the k-th largest magnitude, and how many equal to it are among the k largest.

    ``shifts`` say from which bit on magnitudes are told apart, pass by pass; ``counts`` is scratch.
    """
    kind = bits.dtype.type
    magnitude = kind(~(kind(1) << kind(8 * bits.itemsize - 1)))
    prefix, before, wanted = kind(0), kind(8 * bits.itemsize - 1), k
    for level in range(shifts.shape[0]):
        shift = kind(shifts[level])
        width = kind(before - shift)
        digits = kind((kind(1) << width) - kind(1))
        counts[:] = 0
        for place in range(bits.shape[0]):
            here = kind(bits[place] & magnitude)
            counts[(here >> shift) & digits] += here >> before == prefix
        digit = counts.shape[0] - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix, before = kind((prefix << width) | kind(digit)), shift
        if counts[digit] == wanted:  # all of them, whatever their lower bits are
            return kind(prefix << shift), k
    return prefix, wanted


class Buffer(NamedTuple):
    """Room for elements that may be among the k largest: for at least k + CHUNK of them."""

    indices: Array
    values: Array
    bits: Array  # the same memory as the values
    counts: Array
    shifts: Array


@compiled
def _cut_down(buffer: Buffer, count: int, k: int) -> Any:
    """Move the k largest to the front, in their order; return their smallest magnitude."""
    bits = buffer.bits[:count]
    kind = bits.dtype.type
    magnitude = kind(~(kind(1) << kind(8 * bits.itemsize - 1)))
    threshold, ties = find_threshold(bits, k, buffer.counts, buffer.shifts)
    moved = 0
    for place in range(count):
        here = kind(bits[place] & magnitude)
        if here > threshold or (here == threshold and ties > 0):
            ties -= here == threshold
            buffer.indices[moved] = buffer.indices[place]
            buffer.values[moved] = buffer.values[place]
            moved += 1
    return threshold


@compiled
def _collect(
    kept: Array | None,
    gradient: Array | None,
    pending: Array,
    bits: Array,
    k: int,
    buffer: Buffer,
    floor: Any,
) -> tuple[int, Any]:
    """Put what may be among the k largest and reaches the floor into the buffer.

    Return how many there are, and the largest magnitude of all. Without ``kept`` nothing is added.
    """
    kind = bits.dtype.type
    magnitude = kind(~(kind(1) << kind(8 * bits.itemsize - 1)))
    size, highest = 0, kind(0)
    for start in range(0, bits.shape[0], CHUNK):
        if kept is not None and gradient is not None:
            old, new = kept[start : start + CHUNK], gradient[start : start + CHUNK]
            total = pending[start : start + CHUNK]
            for place in range(total.shape[0]):
                total[place] = old[place] + new[place]
        part = bits[start : start + CHUNK]
        top = kind(0)
        for place in range(part.shape[0]):
            top = max(top, kind(part[place] & magnitude))
        highest = max(highest, top)
        if top < floor:
            continue
        if size + CHUNK > buffer.indices.shape[0]:
            floor = kind(_cut_down(buffer, size, k) + kind(1))
            size = k
        for place in range(part.shape[0]):  # without a branch that cannot be foreseen
            buffer.indices[size] = start + place
            buffer.values[size] = pending[start + place]
            size += kind(part[place] & magnitude) >= floor
    return size, highest


@compiled
def _likely_floor(kept: Array, gradient: Array, k: int, buffer: Buffer) -> Any:
    """Guess from a sample what about twice k elements reach; 0 where that would be unsure."""
    numel = kept.shape[0]
    runs = SAMPLE // CHUNK
    above = 2 * k * SAMPLE // numel
    if numel < 4 * SAMPLE or not LEAST_SAMPLED_ABOVE <= above < SAMPLE:
        return buffer.bits.dtype.type(0)
    sample, bits = buffer.values[:SAMPLE], buffer.bits[:SAMPLE]
    for run in range(runs):
        start = run * (numel // runs)
        for place in range(CHUNK):
            sample[run * CHUNK + place] = kept[start + place] + gradient[start + place]
    return find_threshold(bits, above, buffer.counts, buffer.shifts)[0]


@compiled
def take_largest(
    kept: Array | None,
    gradient: Array | None,
    pending: Array,
    bits: Array,
    k: int,
    buffer: Buffer,
) -> Any:
    """Move the k largest of kept + gradient to the front of the buffer; the rest is ``pending``.

    Without the first two, these are the k largest of what is pending. ``bits`` is the same memory.
    Return the bits of the largest magnitude: if they are not those of a number, nothing has a
    meaning.
    """
    floor = bits.dtype.type(0)
    if kept is not None and gradient is not None:
        floor = _likely_floor(kept, gradient, k, buffer)
    size, highest = _collect(kept, gradient, pending, bits, k, buffer, floor)
    if size < k:  # the sample has misled us
        size, _ = _collect(None, None, pending, bits, k, buffer, bits.dtype.type(0))
    if size > k:
        _cut_down(buffer, size, k)
    for place in range(k):
        pending[buffer.indices[place]] = 0
    return highest


@compiled
def add_sparse(
    first_indices: Array,
    first_values: Array,
    second_indices: Array,
    second_values: Array,
    indices: Array,
    values: Array,
) -> int:
    """Add two vectors with ascending indices, and return how many elements the sum has."""
    a = b = count = 0
    while a < first_indices.shape[0] and b < second_indices.shape[0]:
        here, there = first_indices[a], second_indices[b]
        if here == there:
            indices[count], values[count] = here, first_values[a] + second_values[b]
            a, b = a + 1, b + 1
        elif here < there:
            indices[count], values[count] = here, first_values[a]
            a += 1
        else:
            indices[count], values[count] = there, second_values[b]
            b += 1
        count += 1
    for rest in range(a, first_indices.shape[0]):
        indices[count], values[count] = first_indices[rest], first_values[rest]
        count += 1
    for rest in range(b, second_indices.shape[0]):
        indices[count], values[count] = second_indices[rest], second_values[rest]
        count += 1
    return count


class Parts(NamedTuple):
    """Room for both parts of a vector, each for all of its elements and one more."""

    inside_indices: Array
    inside_values: Array
    outside_indices: Array
    outside_values: Array


@compiled
def part_largest(
    indices: Array, values: Array, bits: Array, k: int, counts: Array, shifts: Array, parts: Parts
) -> int:
    """Put the k largest inside, the others outside, and return how many are inside."""
    kind = bits.dtype.type
    magnitude = kind(~(kind(1) << kind(8 * bits.itemsize - 1)))
    threshold, ties = find_threshold(bits, k, counts, shifts)
    inside = 0
    for place in range(bits.shape[0]):  # written to both, without a branch: the next one overwrites
        parts.inside_indices[inside] = parts.outside_indices[place - inside] = indices[place]
        parts.inside_values[inside] = parts.outside_values[place - inside] = values[place]
        here = kind(bits[place] & magnitude)
        equal = here == threshold
        inside += (here > threshold) | (equal & (ties > 0))
        ties -= equal
    return inside


@compiled
def part_by(indices: Array, values: Array, chosen: Array, parts: Parts) -> int:
    """Put elements with a chosen index inside, others outside; return how many are inside."""
    inside = wanted = 0
    for place in range(indices.shape[0]):
        index = indices[place]
        while wanted < chosen.shape[0] and chosen[wanted] < index:
            wanted += 1
        parts.inside_indices[inside] = parts.outside_indices[place - inside] = index
        parts.inside_values[inside] = parts.outside_values[place - inside] = values[place]
        inside += wanted < chosen.shape[0] and chosen[wanted] == index
    return inside

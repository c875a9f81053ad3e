"""Selection where the gradient is: by operators of torch that run on any device, and one copy.

How many elements reach a threshold stays on the device. What crosses to the host is one message of
k indices and values with a count before them, in the form in which exchanges send them on.

Note: how the k largest are found
    Magnitudes are compared as bit patterns: without the sign bit, those of IEEE numbers are ordered
    like the numbers, Inf and NaN above all others. A sample tells a floor that about twice k
    elements reach. Those that do are put beside each other, in the order of indices, and only they
    are sorted, stably, so that of equals the smaller index wins. There is room for four times k.
    Where fewer than k reach the floor, or more than there is room for, the message says so in the
    place of a count. Then, as where k is a large share of all elements, the k-th largest magnitude
    is found bit by bit, by counting how many elements reach it: twice as many passes over memory as
    a magnitude has bits, whatever the numbers are. The result does not depend on the way.

Note: putting beside each other
    A running count of those that are chosen ascends, and where it first reaches j is the place of
    the j-th. So a search for 1, 2, … in it finds all places: without a scatter over all elements,
    and without a size that the host would have to ask for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
import torch

from gradweave._src.comm.staging import HostCopy
from gradweave._src.sparse.vectors import HEADER, NOT_FINITE, SparseVector, index_type, unpack
from gradweave._src.torch_internals import HOST

# So many elements are sampled at most, or sorted at once where there are no more.
SAMPLE = 1 << 15
LEAST_SAMPLED_ABOVE = 64  # fewer say little
CANDIDATES_PER_CHOSEN = 2  # expected above the floor; there is room for twice as many
# Where more than this share of all elements would be sorted, counting takes less time.
MOST_SORTED = 1 / 8

FLOOR_MISSED = NOT_FINITE - 1  # in the place of a count

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Where the k largest are, ascending."""

    places: torch.Tensor
    is_right: torch.Tensor | None = None  # a truth value on the device; None: they certainly are


@dataclass(frozen=True, slots=True)
class _Floor:
    """How a floor is guessed, and how many elements above it there is room for."""

    stride: int
    above: int  # so many of the sample reach the floor
    room: int

    @classmethod
    def of(cls, numel: int, k: int) -> "_Floor":
        stride = ceil(numel / SAMPLE) | 1  # odd, because rows have even lengths
        sampled = ceil(numel / stride)
        above = max(LEAST_SAMPLED_ABOVE, ceil(CANDIDATES_PER_CHOSEN * k * sampled / numel))
        return cls(stride, above, 2 * ceil(above * numel / sampled))


def take_by_threshold(add: Callable[[], torch.Tensor], k: int) -> SparseVector:
    """Take the k largest, fewer than all, out of what ``add`` returns, where zeros are left.

    ``add`` makes the same again whenever it is called. The host waits for one copy, or for two
    where the sample was misleading.
    """
    total = add()
    numel = len(total)
    floor = _Floor.of(numel, k)
    taken = None
    if numel <= SAMPLE:
        taken = _take(total, k, _choose_by_sorting)
    elif floor.room <= MOST_SORTED * numel:
        taken = _take(total, k, partial(_choose_above, floor))
        if taken is None:
            total = add()
    if taken is None:
        taken = _take(total, k, _choose_bit_by_bit)
    assert taken is not None, "only a floor is missed"
    return taken


def _take(
    total: torch.Tensor, k: int, choose: Callable[[torch.Tensor, int], _Chosen]
) -> SparseVector | None:
    """Take out what ``choose`` chooses; None where that is wrong, and so is what is left."""
    integers = INTEGERS[total.dtype]
    magnitudes = total.view(integers) & torch.iinfo(integers).max
    chosen = choose(magnitudes, k)
    infinite = torch.tensor(torch.inf, dtype=total.dtype, device=HOST).view(integers).item()
    is_finite = magnitudes.max() < infinite
    count = k if chosen.is_right is None else torch.where(chosen.is_right, k, FLOOR_MISSED)
    header = torch.where(is_finite, count, NOT_FINITE).view(1)
    kinds = total.dtype, torch.int32 if index_type(len(total)) == np.int32 else torch.int64
    values, indices = total[chosen.places], chosen.places.to(kinds[1])
    total.index_fill_(0, chosen.places, 0)
    parts = [values, indices]
    if values.itemsize < indices.itemsize:  # as messages of exchanges have them
        parts.reverse()
    message = HostCopy(torch.cat([part.view(torch.uint8) for part in (header, *parts)]))
    arrived = message.read().numpy()
    if arrived[: HEADER.itemsize].view(HEADER)[0] == FLOOR_MISSED:
        return None
    samples = (torch.empty(0, dtype=kind, device=HOST).numpy() for kind in kinds)
    return unpack(arrived, *(sample.dtype for sample in samples))


def _choose_by_sorting(magnitudes: torch.Tensor, k: int) -> _Chosen:
    return _Chosen(_largest(magnitudes, k))


def _choose_above(floor: _Floor, magnitudes: torch.Tensor, k: int) -> _Chosen:
    sample = magnitudes[:: floor.stride].sort(descending=True).values
    running = _running_count(magnitudes >= sample[floor.above - 1])
    count = running[-1]
    ordinals = _ordinals(floor.room, running)
    # Ordinals beyond the count have no place; what they find is not looked at.
    places = torch.searchsorted(running, ordinals).clamp_(max=len(magnitudes) - 1)
    candidates = torch.where(ordinals <= count, magnitudes[places], -1)
    is_right = (count >= k) & (count <= floor.room)
    return _Chosen(places[_largest(candidates, k)], is_right)


def _choose_bit_by_bit(magnitudes: torch.Tensor, k: int) -> _Chosen:
    kth = magnitudes.new_zeros(())
    for bit in reversed(range(8 * magnitudes.itemsize - 1)):
        larger = kth | (1 << bit)
        kth = torch.where((magnitudes >= larger).sum() >= k, larger, kth)
    above, equal = magnitudes > kth, magnitudes == kth
    running = _running_count(above | (equal & (_running_count(equal) <= k - above.sum())))
    return _Chosen(torch.searchsorted(running, _ordinals(k, running)))


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """Return where the k largest are, ascending; of equals the first ones."""
    return magnitudes.sort(stable=True, descending=True).indices[:k].sort().values


def _running_count(chosen: torch.Tensor) -> torch.Tensor:
    return chosen.cumsum(0, dtype=torch.int32 if len(chosen) < 2**31 else torch.int64)


def _ordinals(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=like.dtype, device=like.device)

"""Parts of tensors as boxes, which is how torch.distributed.checkpoint names them.

A rank's part of a parameter is a run of its elements as they lie in memory. Cut along rows, such a
run is a few boxes: the end of a row, whole rows, the beginning of a row, and so on inside of those.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Some neighbouring elements of a tensor, which are also neighbours in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int  # the place of its first element in the part


def boxes_of(shape: Sequence[int], strides: Sequence[int], first: int, last: int) -> list[Box]:
    """Return the boxes that the elements from ``first`` to before ``last`` in memory make up.

    ``strides`` are those of a tensor without gaps, in any memory format.
    """
    order = memory_order(strides)
    found = []
    for box in _cut([shape[dim] for dim in order], first, last):
        offsets, sizes = [0] * len(order), [0] * len(order)
        for place, dim in enumerate(order):
            offsets[dim], sizes[dim] = box.offsets[place], box.sizes[place]
        found.append(Box(tuple(offsets), tuple(sizes), box.first - first))
    return found


def memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the one with the largest steps in memory to the smallest."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _cut(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Yield the boxes of a tensor whose dimensions are in the order of its memory."""
    if first >= last:
        return
    if not shape:
        yield Box((), (), first)
        return
    row = prod(shape[1:])
    (top, begins), (bottom, ends) = divmod(first, row), divmod(last, row)
    if top == bottom:
        yield from _in_row(shape, top, begins, ends)
        return
    if begins:
        yield from _in_row(shape, top, begins, row)
        top += 1
    if top < bottom:
        rest = shape[1:]
        yield Box((top, *(0 for _ in rest)), (bottom - top, *rest), top * row)
    yield from _in_row(shape, bottom, 0, ends)


def _in_row(shape: Sequence[int], number: int, first: int, last: int) -> Iterator[Box]:
    before = number * prod(shape[1:])
    for box in _cut(shape[1:], first, last):
        yield Box((number, *box.offsets), (1, *box.sizes), before + box.first)

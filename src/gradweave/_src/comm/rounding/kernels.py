"""Compiled loops for 8-bit numbers. They need numba.

They are written so that the compiler makes vector instructions of them: the largest of a group is
found by bit patterns, which are ordered like magnitudes, and numbers are rounded to even by adding
and taking away 1.5 * 2**23, beyond which float32 has no fractions.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradweave._src.comm.compiled import compiled

Array = NDArray[Any]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NO_FRACTIONS = np.float32(12582912.0)
LARGEST = np.float32(127.0)
SMALLEST = np.float32(1e-36)
ZERO, NAN = np.float32(0.0), np.float32(np.nan)


@compiled
def round_to_8_bits(
    values: Array, scales: Array, integers: Array, dropped: Array | None, group: int
) -> None:
    """Round values, of which every ``group`` share a scale; add what that drops to ``dropped``."""
    bits = values.view(np.uint32)
    top_bits = np.empty(1, np.uint32)
    top_number = top_bits.view(np.float32)
    for number in range(scales.shape[0]):
        start = number * group
        here, here_bits = values[start : start + group], bits[start : start + group]
        there = integers[start : start + group]
        top = np.uint32(0)
        for place in range(here_bits.shape[0]):
            top = max(top, here_bits[place] & MAGNITUDE)
        top_bits[0] = top
        largest = top_number[0]
        scale = factor = ZERO
        if top >= INFINITE:
            scales[number] = NAN
            there[:] = 0
            continue
        if largest >= SMALLEST:
            scale, factor = largest / LARGEST, LARGEST / largest
        scales[number] = scale
        if dropped is None:
            for place in range(here.shape[0]):
                there[place] = np.int8((here[place] * factor + NO_FRACTIONS) - NO_FRACTIONS)
        else:
            kept = dropped[start : start + group]
            for place in range(here.shape[0]):
                rounded = (here[place] * factor + NO_FRACTIONS) - NO_FRACTIONS
                there[place] = np.int8(rounded)
                kept[place] += here[place] - rounded * scale


@compiled
def write_8_bits(scales: Array, integers: Array, values: Array, group: int) -> None:
    for number in range(scales.shape[0]):
        scale, start = scales[number], number * group
        here, there = values[start : start + group], integers[start : start + group]
        for place in range(here.shape[0]):
            here[place] = scale * np.float32(there[place])


@compiled
def add_8_bits(scales: Array, integers: Array, values: Array, group: int) -> None:
    for number in range(scales.shape[0]):
        scale, start = scales[number], number * group
        here, there = values[start : start + group], integers[start : start + group]
        for place in range(here.shape[0]):
            here[place] += scale * np.float32(there[place])

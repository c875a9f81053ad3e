"""The intervals that pages of results print."""

from math import exp, lgamma, pi, sqrt

import numpy as np
import pytest
from intervals import half_width, paired_ratios, with_interval


def share_within(student, freedom):
    """The probability that Student's t lies between -student and student, by Simpson's rule."""
    points = np.linspace(-student, student, 20_001)
    height = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(freedom * pi)
    density = height * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    weights = np.tile([2.0, 4.0], 10_001)[:20_001]
    weights[[0, -1]] = 1
    return float(weights @ density) * (points[1] - points[0]) / 3


@pytest.mark.parametrize("repeats", [2, 3, 4, 5, 6, 10, 15, 30, 31, 32, 200])
def test_the_half_width_is_of_95_percent(repeats):
    values = [float(number) for number in range(repeats)]
    error = np.std(values, ddof=1) / sqrt(repeats)
    expected = pytest.approx(0.95, abs=1e-3 if repeats > 31 else 1e-4)
    assert share_within(half_width(values) / error, repeats - 1) == expected


def test_ratios_are_of_neighbours():
    assert paired_ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="longer"):
        paired_ratios([1.0], [2.0, 3.0])


def test_one_value_has_no_interval():
    assert with_interval([1.23456]) == "1.235"
    assert with_interval([1.0, 1.0, 1.0], digits=2) == "1.00 ± 0.00"

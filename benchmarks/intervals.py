"""How sure a mean of a few repeats is, as the pages of results print it."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

# Student's t for 95 % by degrees of freedom, from 1 up; beyond them its first expansion is close.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of two or more independent values.

    Few repeats have wide intervals: three of them are judged by 4.3 standard errors, not by 2.
    """
    freedom = len(values) - 1
    if freedom <= len(_STUDENT):
        student = _STUDENT[freedom - 1]
    else:
        student = _NORMAL * (1 + (_NORMAL**2 + 1) / (4 * freedom))
    return student * stdev(values) / sqrt(len(values))


def with_interval(values: Sequence[float], *, digits: int = 3) -> str:
    """Return the mean and, of more than one value, the half of its 95 % interval."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {half_width(values):.{digits}f}"


def paired_ratios(ours_s: Sequence[float], others_s: Sequence[float]) -> list[float]:
    """Return ours over the other's, repeat by repeat: neighbours in time had the same machine."""
    return [one_s / other_s for one_s, other_s in zip(ours_s, others_s, strict=True)]

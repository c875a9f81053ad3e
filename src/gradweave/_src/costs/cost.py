"""Seconds over bytes: what one message costs. A line, a measured curve, or a formula."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gradweave._src.checks import LARGEST, SMALLEST, require_not_negative
from gradweave._src.errors import RequestError

FloatArray = NDArray[np.float64]
# One size gives one time, many give as many.
Numbers = TypeVar("Numbers", float, FloatArray)


# From sizes and seconds to the line that describes them best, in one sense or the other.
Fitting = Callable[[FloatArray, FloatArray], "Line"]


def fit_line(nbytes: FloatArray, seconds: FloatArray) -> "Line":
    """Return the line with the least relative errors: small messages count like large ones.

    A negative start-up or slope, which no network has, becomes zero.
    """
    return _weighted_line(nbytes, seconds, 1 / seconds)


def least_squares(nbytes: FloatArray, seconds: FloatArray) -> "Line":
    """Return the line with the least squared errors in seconds, as the MG-WFBP papers fit theirs.

    Large messages decide it, so its start-up is what large messages seem to have paid, which is
    several times what the smallest ones cost where a curve bends. A negative start-up or slope
    becomes zero.
    """
    return _weighted_line(nbytes, seconds, np.ones_like(seconds))


def _weighted_line(nbytes: FloatArray, seconds: FloatArray, weight: FloatArray) -> "Line":
    slope, startup = np.polyfit(nbytes, seconds, 1, w=weight)
    if startup < 0:
        weighted = nbytes * weight
        slope, startup = weighted @ (seconds * weight) / (weighted @ weighted), 0.0
    if slope < 0:
        slope, startup = 0.0, (seconds * weight**2).sum() / (weight**2).sum()
    return Line(startup_s=float(startup), s_per_byte=float(slope))


class Cost(Protocol):
    """The cost of one message as a function of its size; ``Network.cost`` returns it.

    It is a line, a curve, or made of such.
    """

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Return the seconds that a message of ``nbytes`` bytes takes; an array for many sizes."""
        ...

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> "Line":
        """Return the line that describes messages of up to ``largest_bytes`` bytes best.

        Args:
            largest_bytes: the size of the largest message.
            fitted: makes a line of sizes and seconds (default: by the least relative errors).
        """
        ...

    @property
    def known_to_bytes(self) -> float:
        """The size beyond which the answer is an extrapolation."""
        ...


class Line(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="line"
):
    """A start-up, then time per byte: the papers' ``a + b M``.

    Attributes:
        startup_s: seconds that a message takes however small it is.
        s_per_byte: seconds that each byte adds.

    Raises:
        RequestError: if a number is negative or not finite.

    Examples:
        >>> gradweave.Line(startup_s=0.001, s_per_byte=1e-8).seconds(100_000)
        0.002
    """

    startup_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        require_not_negative(self, "startup_s", "s_per_byte")

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Return the seconds that a message of ``nbytes`` bytes takes; an array for many sizes."""
        return self.startup_s + self.s_per_byte * nbytes

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> "Line":
        """Return the line itself."""
        del largest_bytes, fitted
        return self

    @property
    def known_to_bytes(self) -> float:
        """The size beyond which the answer is an extrapolation: a line has none."""
        return np.inf


def total_line(*lines: Line) -> Line:
    """Return the line of all these costs together, one after the other."""
    return reduce(_both, lines)


def _both(one: Line, other: Line) -> Line:
    return Line(
        startup_s=one.startup_s + other.startup_s,
        s_per_byte=one.s_per_byte + other.s_per_byte,
    )


@dataclass(frozen=True, slots=True)
class Total:
    """What several costs take, one after the other."""

    parts: tuple[Cost, ...]

    def seconds(self, nbytes: Numbers) -> Numbers:
        first, *others = self.parts
        total_s = first.seconds(nbytes)
        for part in others:
            total_s = total_s + part.seconds(nbytes)
        return total_s

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        return total_line(*(part.line(largest_bytes, fitted) for part in self.parts))

    @property
    def known_to_bytes(self) -> float:
        return min(part.known_to_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Share:
    """The cost of a message of which only a share of the bytes is sent."""

    whole: Cost
    share: float

    def seconds(self, nbytes: Numbers) -> Numbers:
        return self.whole.seconds(self.share * nbytes)

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        line = self.whole.line(self.share * largest_bytes, fitted)
        return Line(startup_s=line.startup_s, s_per_byte=self.share * line.s_per_byte)

    @property
    def known_to_bytes(self) -> float:
        return self.whole.known_to_bytes / self.share


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cost of a message that takes the cheapest of several ways for its size."""

    ways: tuple[Cost, ...]

    def seconds(self, nbytes: Numbers) -> Numbers:
        cheapest: Numbers = np.min([way.seconds(nbytes) for way in self.ways], axis=0)
        return cheapest

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        """Return the line of the way which the largest message takes."""
        size = np.array([largest_bytes])
        way = min(self.ways, key=lambda one: float(one.seconds(size)[0]))
        return way.line(largest_bytes, fitted)

    @property
    def known_to_bytes(self) -> float:
        return min(way.known_to_bytes for way in self.ways)


@dataclass(frozen=True, slots=True)
class Times:
    """A cost that is so many times another."""

    factor: float
    cost: Cost

    def seconds(self, nbytes: Numbers) -> Numbers:
        return self.factor * self.cost.seconds(nbytes)

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        line = self.cost.line(largest_bytes, fitted)
        return Line(
            startup_s=self.factor * line.startup_s, s_per_byte=self.factor * line.s_per_byte
        )

    @property
    def known_to_bytes(self) -> float:
        return self.cost.known_to_bytes


FREE = Line(startup_s=0.0, s_per_byte=0.0)


class Curve(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="curve",
    dict=True,  # for what is computed once
):
    """Measured points, joined by straight lines.

    Below the first point a message costs what the first point costs. Beyond the last point the
    curve goes on with the slope of its last octave: two neighbouring points are too noisy for it.

    Attributes:
        nbytes: sizes in bytes, at least two, increasing.
        measured_s: seconds for each size.

    Raises:
        RequestError: if sizes do not increase, or a time is not positive.

    Examples:
        >>> curve = gradweave.Curve(nbytes=(1024, 2048), measured_s=(0.001, 0.0015))
        >>> float(curve.seconds(1536))
        0.00125
    """

    nbytes: tuple[int, ...]
    measured_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.nbytes) != len(self.measured_s):
            raise RequestError(
                f"nbytes has {len(self.nbytes)} entries and measured_s {len(self.measured_s)}"
            )
        if len(self.nbytes) < 2:  # noqa: PLR2004
            raise RequestError(f"nbytes must have at least two entries, got {len(self.nbytes)}")
        if self.nbytes[0] < 1:
            raise RequestError(f"nbytes must be positive, got {self.nbytes[0]}")
        if self.nbytes[-1] > LARGEST:
            raise RequestError(f"nbytes must be at most {LARGEST:.0e}")
        for before, after in pairwise(self.nbytes):
            if after <= before:
                raise RequestError(f"nbytes must increase, got {after} after {before}")
        for size, seconds in zip(self.nbytes, self.measured_s, strict=True):
            if not SMALLEST <= seconds <= LARGEST:
                raise RequestError(f"measured_s at {size} bytes must be positive, got {seconds}")
        if self._last_slope < 0:
            raise RequestError(
                f"measured_s falls over the last octave, slope {self._last_slope:g} s per byte; "
                "larger messages cannot cost less: measure again or leave the points out"
            )

    @property
    def _last_slope(self) -> float:
        """The slope of the last octave, in seconds per byte."""
        # The largest size that is at most half of the last one; the first size where there is none.
        before = max(0, bisect_right(self.nbytes, self.nbytes[-1] / 2) - 1)
        rise_s = self.measured_s[-1] - self.measured_s[before]
        return rise_s / (self.nbytes[-1] - self.nbytes[before])

    @cached_property
    def _points(self) -> tuple[FloatArray, FloatArray]:
        """The points as arrays: planners ask for prices thousands of times."""
        return np.array(self.nbytes, dtype=np.float64), np.array(self.measured_s, dtype=np.float64)

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Return the seconds that a message of ``nbytes`` bytes takes; an array for many sizes."""
        within = np.interp(nbytes, *self._points)
        seconds: Numbers = within + self._last_slope * np.maximum(nbytes - self.nbytes[-1], 0.0)
        return seconds

    def line(self, largest_bytes: float, fitted: Fitting = fit_line) -> Line:
        """Return the line through the measured points, however large a message is asked for."""
        del largest_bytes
        return fitted(np.array(self.nbytes, dtype=np.float64), np.array(self.measured_s))

    @property
    def known_to_bytes(self) -> float:
        """The size of the last point, beyond which the answer is an extrapolation."""
        return self.nbytes[-1]


class Fit(Struct, frozen=True, kw_only=True):
    """How well a line describes measured points."""

    line: Line
    r_squared: float  # of the seconds, so it is about large messages
    worst_residual: float  # as a share of what was measured, so it is about all of them


def fit(curve: Curve) -> Fit:
    nbytes, seconds = np.array(curve.nbytes, dtype=np.float64), np.array(curve.measured_s)
    line = fit_line(nbytes, seconds)
    residuals = seconds - line.seconds(nbytes)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return Fit(
        line=line,
        r_squared=1.0 - float((residuals**2).sum()) / spread if spread > 0 else 1.0,
        worst_residual=float(np.abs(residuals / seconds).max()),
    )

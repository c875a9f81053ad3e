"""What every value checks when it is made. The message names the field and the value found."""

from math import isfinite

from msgspec import Struct


def require_positive(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not (isfinite(found) and found > 0):
            raise ValueError(f"{_subject(value)}{field} must be positive, got {found}")


def require_finite(value: Struct, *fields: str) -> None:
    """A finite number of at least zero: a time, a latency, a rate."""
    for field in fields:
        found = getattr(value, field)
        if not (isfinite(found) and found >= 0):
            raise ValueError(f"{_subject(value)}{field} must be a number >= 0, got {found}")


def _subject(value: Struct) -> str:
    name = getattr(value, "name", None)
    return f"{name!r}: " if name else ""

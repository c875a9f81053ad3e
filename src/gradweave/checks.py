"""What every value checks when it is made. The message names the field and the value found."""

from msgspec import Struct

from gradweave.errors import RequestError

# No time, size or rate in a training job is larger; sums and products of such numbers stay finite.
LARGEST = 10**15


def require_positive(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not 0 < found <= LARGEST:
            raise ValueError(f"{_subject(value)}{field} must be positive{_but(found)}")


def require_not_negative(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not 0 <= found <= LARGEST:
            raise ValueError(f"{_subject(value)}{field} must be a number >= 0{_but(found)}")


def require_text(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not found:
            raise ValueError(f"{field} must not be empty")
        if any("\ud800" <= character <= "\udfff" for character in found):
            raise ValueError(f"{field} must be text that can be written, got {found!a}")


def require_kind(call: str, **arguments: tuple[object, type]) -> None:
    """Raise RequestError unless each argument is what its name says: swapped ones look alike."""
    for name, (found, kind) in arguments.items():
        if not isinstance(found, kind):
            hint = ""
            if isinstance(found, str) and kind.__name__ in {"Trace", "Network"}:
                hint = f"; gradweave.load_{kind.__name__.lower()}({found[:80]!r}) makes one"
            raise RequestError(
                f"{call}: {name} must be a {kind.__name__}, got a {type(found).__name__}{hint}"
            )


def _but(found: float) -> str:
    """What was found; a number with hundreds of digits is not worth reading."""
    too_large = isinstance(found, int) and found > LARGEST
    return f" and at most {LARGEST:.0e}" if too_large else f", got {found}"


def _subject(value: Struct) -> str:
    name = getattr(value, "name", None)
    return f"{name!r}: " if name else ""

"""What every value checks when it is made. The message names the field and the value found.

Values are made from files and from other values, so whoever asks for one that cannot exist is told
in one line here, too.
"""

from collections.abc import Collection, Iterable
from importlib.util import find_spec

from msgspec import Struct

from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import LONGEST_VALUE, is_writable, printable, quoted

# No time, size or rate in a training job is larger; sums and products of such numbers stay finite.
LARGEST = 10**15
# No message is faster; what is divided by such a number stays finite, too.
SMALLEST = 1e-15


def require_positive(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not 0 < found <= LARGEST:
            raise RequestError(f"{_subject(value)}{field} must be positive{_but(found)}")


def require_not_negative(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not 0 <= found <= LARGEST:
            raise RequestError(f"{_subject(value)}{field} must be a number >= 0{_but(found)}")


def require_text(value: Struct, *fields: str) -> None:
    for field in fields:
        found = getattr(value, field)
        if not found:
            raise RequestError(f"{field} must not be empty")
        if not is_writable(found):
            raise RequestError(f"{field} must be text that can be written, got {quoted(found)}")


def require_one_of(value: Struct, **allowed: Collection[str]) -> None:
    """Raise RequestError unless each of these fields is one of the texts that it may be."""
    for field, known in allowed.items():
        found = getattr(value, field)
        if found not in known:
            one_of = ", ".join(known)
            raise RequestError(
                f"{_subject(value)}{field} must be one of {one_of}, got {quoted(found)}"
            )


def first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that has been there before; None where all are different."""
    names = list(names)
    if len(set(names)) == len(names):
        return None  # as nearly always
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


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


def why_missing(
    module: str, *, what: str, extra: str | None = None, install: str | None = None
) -> str | None:
    """Return what to install for something to work; None where its module is there.

    That is an extra of Gradweave's, or what pip is to ``install``.
    """
    if find_spec(module) is not None:
        return None
    wanted = install or f"'gradweave[{extra}]'"
    return f"{what} needs {module}, which is not installed; pip install {wanted}"


def require_module(library: str, *, what: str) -> None:
    """Raise ModuleNotFoundError in one line where another's library is not installed."""
    if why := why_missing(library, what=what, install=library.replace("_", "-")):
        raise ModuleNotFoundError(why, name=library)


def _but(found: float) -> str:
    """Return how an error message ends: with the value found, unless that is too long to read."""
    too_large = isinstance(found, int) and found > LARGEST
    shown = printable(str(found), most=LONGEST_VALUE)
    return f" and at most {LARGEST:.0e}" if too_large else f", got {shown}"


def _subject(value: Struct) -> str:
    name = getattr(value, "name", None)
    return f"{quoted(name)}: " if name else ""

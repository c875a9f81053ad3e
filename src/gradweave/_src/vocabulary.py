"""The vocabulary: names that files, tables and the command line share; how text is read, made."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from gradweave._src.errors import RequestError

Operation = Literal["all-reduce", "broadcast", "reduce", "reduce-scatter", "all-gather"]
Origin = Literal["measured", "estimated"]
Topology = Literal["fat-tree", "torus"]
Beside = Literal["nothing", "compute"]
ReplayMode = Literal["waiting", "dispatching"]
# While which passes messages travel: all-reduced beside backward, or reduce-scattered beside
# backward and all-gathered beside the next forward.
Passes = Literal["backward", "both"]

KIB, MIB = 2**10, 2**20
_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KIB, "MiB": MIB, "GiB": 2**30}

# Of a line for people, and of a value in it: whatever is longer was not meant to be read.
LONGEST_LINE, LONGEST_VALUE = 2000, 200
ELLIPSIS = "…"
# In bytes; disks take 255, and we put something behind it.
LONGEST_FILE_NAME = 150


class Way(NamedTuple):
    """What is done, and by which algorithm."""

    operation: Operation
    collective: str


class Spec(NamedTuple):
    """A name, and what stands behind its colon: ``fixed:25MiB``, ``parameter-server:4``."""

    name: str
    argument: str | None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


def parse_spec(text: str) -> Spec:
    name, colon, argument = text.partition(":")
    return Spec(name, argument if colon else None)


def alternatives(name: str, known: Iterable[str], *, listed: str = "there are") -> str:
    """Return what follows ``no planner 'optiml'``: which may have been meant, and all of them."""
    names = list(known)
    listing = f"{listed} {', '.join(names)}"
    close = closest(name, names)
    return f"; {listing}" if close is None else f", did you mean {close}? {sentence(listing)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt almost like it; None where there is none."""
    spelt = {one.lower(): one for one in known}
    # Nobody misspells a name by writing hundreds of letters.
    return next((spelt[one] for one in get_close_matches(name[:80].lower(), spelt, n=1)), None)


def sentence(text: str) -> str:
    """Return the text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def refuse_argument(spec: Spec) -> None:
    if spec.argument is not None:
        raise RequestError(f"{spec.name!r} takes no argument, got {spec.argument!r}")


def parse_servers(spec: Spec, workers: int) -> int:
    """Return the servers, which are workers: four of ``parameter-server:4``, one by default."""
    text = "1" if spec.argument is None else spec.argument
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(workers))
    if not is_short or not 1 <= int(text) <= workers:
        raise RequestError(
            f"{spec.name}:{text[:40]}: expected 1 to {workers} servers, each of them one of the "
            "workers"
        )
    return int(text)


def parse_tiers(argument: str, tiers: int) -> tuple[str, ...]:
    """Return a name for each tier, innermost first, of ``ring/pat``, or of ``pat`` for all."""
    named = tuple(argument.split("/"))
    return named * tiers if len(named) == 1 else named


def parse_bytes(text: str) -> int:
    """Read a size, which always has its unit: ``25MiB`` is 25 * 2**20, ``25MB`` is 25 * 10**6."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]i?B|B)?", text.strip(), re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a size; write it as 64KiB, 25MiB or 100MB")
    if match[2] is None:
        raise RequestError(
            f"{text!r} is not a size without its unit; write {match[1]}MiB, or {match[1]}B for "
            "bytes"
        )
    nbytes = int(float(match[1]) * _BYTES[match[2]])
    if nbytes < 1:
        raise RequestError(f"a size must be at least one byte, got {text!r}")
    return nbytes


def parse_rate(text: str) -> int:
    """Read a rate, which always has its unit: ``200mbit`` is 200 * 10**6 bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a rate; write it as 1gbit, 200mbit or 100kbit")
    bits_per_s = round(float(match[1]) * _BITS_PER_S[match[2]])
    if bits_per_s < 1:
        raise RequestError(f"a rate must be at least one bit per second, got {text!r}")
    return bits_per_s


def parse_duration(text: str) -> float:
    """Read a duration, which always has its unit: ``0.2ms`` is 0.0002 seconds."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(ns|us|ms|s)?", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a duration; write it as 50us, 0.2ms or 1s")
    if match[2] is None:
        raise RequestError(
            f"{text!r} is not a duration without its unit; write {match[1]}s or {match[1]}ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def printable(text: str, *, most: int = LONGEST_LINE) -> str:
    """Return text from outside as it is shown: one line, and nothing that a terminal would obey.

    What is no visible character is written as Python writes it (escape sequences, line ends, marks
    that turn letters round), and of what is too long the middle is left out.
    """
    if len(text) <= most and text.isprintable():
        return text
    first, last = (text, "") if len(text) <= most else (text[:most], text[-most:])
    shown, end = (_escaped(part) for part in (first, last))
    if last or len(shown) > most:
        half = (most - 1) // 2
        shown = f"{shown[:half]}{ELLIPSIS}{(end or shown)[-half:]}"
    return shown


def _escaped(text: str) -> str:
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def all_printable(value: Any) -> Any:
    """Return the same value, with every text in its lists and dictionaries made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: all_printable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(one) for one in value]
    return value


def is_writable(text: str) -> bool:
    """Whether it has no halves of characters, which no file can hold."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


def quoted(text: object) -> str:
    """Return a text as Python writes it, for a message that names what was found."""
    return printable(repr(text), most=LONGEST_VALUE)


def file_name(name: str) -> str:
    """Make a name for a file or folder of any name: one that stays in its place.

    Names that are safe already, and those that only have a colon or a slash too many, are as they
    always were; of all others a digest tells them apart.
    """
    plain = name.replace(":", "-").replace("/", "-")
    safe = "".join(one if one.isprintable() and one != "\\" else "-" for one in plain)
    safe = safe.lstrip(".").encode()[:LONGEST_FILE_NAME].decode(errors="ignore")
    if safe == plain and safe:
        return safe
    return f"{safe}-{sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def time_text(seconds: float) -> str:
    """Return such texts as ``150.0 ms`` or, below a millisecond, ``45.2 us``."""
    is_short = 0 < seconds < 1e-3  # noqa: PLR2004 a millisecond
    return f"{seconds * 1e6:,.1f} us" if is_short else f"{seconds * 1e3:,.1f} ms"


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds as text without a unit, which is empty where nobody knows."""
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def size_text(nbytes: float) -> str:
    """Return such texts as ``102.2 MB``, ``1.4 KB`` or ``400 B``."""
    unit = next((name for name in ("GB", "MB", "KB") if nbytes >= _BYTES[name]), "B")
    return f"{nbytes / _BYTES[unit]:,.{0 if unit == 'B' else 1}f} {unit}"


def count_text(count: int, noun: str) -> str:
    """Return such texts as ``1 message`` or ``5 messages``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

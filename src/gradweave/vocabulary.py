"""The vocabulary: names that files, tables and the command line share, and how text is read."""

import re
from typing import Literal, NamedTuple

from gradweave.errors import RequestError

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
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KIB, "MiB": MIB, "GiB": 2**30}


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


def refuse_argument(spec: Spec) -> None:
    if spec.argument is not None:
        raise RequestError(f"{spec.name!r} takes no argument, got {spec.argument!r}")


def parse_servers(spec: Spec, workers: int) -> int:
    """``parameter-server`` has one server, ``parameter-server:4`` four, each one of the workers."""
    text = "1" if spec.argument is None else spec.argument
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(workers))
    if not is_short or not 1 <= int(text) <= workers:
        raise RequestError(
            f"{spec.name}:{text[:40]}: expected 1 to {workers} servers, each of them one of the "
            "workers"
        )
    return int(text)


def parse_bytes(text: str) -> int:
    """``25MiB`` is 25 * 2**20, ``25MB`` is 25 * 10**6, a bare number is bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]i?B|B)?", text.strip(), re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a size; write it as 64KiB, 25MiB or 100MB")
    nbytes = int(float(match[1]) * _BYTES[match[2] or "B"])
    if nbytes < 1:
        raise RequestError(f"a size must be at least one byte, got {text!r}")
    return nbytes


def parse_rate(text: str) -> int:
    """``200mbit`` is 200 * 10**6 bits per second; a rate always has its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a rate; write it as 1gbit, 200mbit or 100kbit")
    bits_per_s = round(float(match[1]) * _BITS_PER_S[match[2]])
    if bits_per_s < 1:
        raise RequestError(f"a rate must be at least one bit per second, got {text!r}")
    return bits_per_s


def parse_duration(text: str) -> float:
    """``0.2ms`` is 0.0002 seconds; a duration always has its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a duration; write it as 50us, 0.2ms or 1s")
    return float(match[1]) * _SECONDS[match[2]]

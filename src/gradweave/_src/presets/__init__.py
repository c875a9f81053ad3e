"""Shipped traces and networks, found by name; any other name is a file."""

import os
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from gradweave._src import files
from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import alternatives

_FOLDERS: dict[type, str] = {Trace: "traces", Network: "networks"}


def trace_names() -> list[str]:
    return _names(Trace)


def network_names() -> list[str]:
    return _names(Network)


def load_trace(name_or_path: str | os.PathLike[str]) -> Trace:
    """Return a shipped trace, as `gradweave list traces` names them, or read a file of one.

    Raises:
        RequestError: if there is neither.
        FormatError: if the file is not that of a trace.

    Examples:
        >>> gradweave.load_trace("resnet50").batch_size
        32
    """
    return _load(name_or_path, Trace)


def load_network(name_or_path: str | os.PathLike[str]) -> Network:
    """Return a shipped network, as `gradweave list networks` names them, or read a file of one.

    Raises:
        RequestError: if there is neither.
        FormatError: if the file is not that of a network.

    Examples:
        >>> gradweave.load_network("k80-10gbe").name
        'k80-10gbe'
    """
    return _load(name_or_path, Network)


def _load(name_or_path: str | os.PathLike[str], kind: type[files.Value]) -> files.Value:
    name = os.fspath(name_or_path)
    if name in _names(kind):
        found: files.Value = _shipped(name, kind)
        return found
    if not Path(name).exists():
        what = kind.__name__.lower()
        shipped = alternatives(name, _names(kind), listed="shipped are")
        raise RequestError(f"no file and no shipped {what} {name!r}{shipped}")
    return files.read(name, kind)


@cache  # they are values, and reading a large one takes longer than planning for it
def _shipped(name: str, kind: type) -> Any:
    text = (package_files(__name__) / _FOLDERS[kind] / f"{name}.json").read_text("utf-8")
    return files.loads(text, kind, origin=name)


def _names(kind: type) -> list[str]:
    folder = package_files(__name__) / _FOLDERS[kind]
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())

"""Every value as a JSON file that names its schema; strict to read, written whole or not at all."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gradweave.errors import FormatError, RequestError
from gradweave.network import Network
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.remembered import Remembered
from gradweave.results import Losses, Results
from gradweave.timeline import Timeline
from gradweave.trace import Trace
from gradweave.upgrades import UPGRADES

Value = TypeVar("Value", Trace, Network, Plan, Timeline, Results, Losses, Recipe, Remembered)
AnyValue = Trace | Network | Plan | Timeline | Results | Losses | Recipe | Remembered

SCHEMAS: dict[type, str] = {
    Trace: "gradweave.trace/2",
    Network: "gradweave.network/4",
    Plan: "gradweave.plan/3",
    Timeline: "gradweave.timeline/1",
    Results: "gradweave.results/1",
    Losses: "gradweave.losses/1",
    Recipe: "gradweave.recipe/4",
    Remembered: "gradweave.remembered/3",  # a new one with every recipe; older ones are not read
}


def read(path: str | os.PathLike[str], kind: type[Value]) -> Value:
    """A file of that kind, such as ``read("trace.json", Trace)``, of any version."""
    if kind not in SCHEMAS:
        kinds = ", ".join(one.__name__ for one in SCHEMAS)
        raise RequestError(f"read(path, kind): kind must be one of {kinds}, got {kind!r}")
    return loads(read_text(path), kind, origin=str(path))


def holds(path: str | os.PathLike[str], kind: type[Value]) -> bool:
    """Whether the file names the schema of this kind, in any version."""
    document = _parsed(read_text(path), origin=str(path))
    schema = document.get("schema") if isinstance(document, dict) else None
    return str(schema).partition("/")[0] == SCHEMAS[kind].partition("/")[0]


def loads(text: str, kind: type[Value], *, origin: str) -> Value:
    """``origin`` is what error messages call the text."""
    document = _parsed(text, origin=origin)
    expected = SCHEMAS[kind]
    found = document.pop("schema", None) if isinstance(document, dict) else None
    while isinstance(found, str) and found in UPGRADES:
        found, upgrade = UPGRADES[found]
        document = upgrade(document)
    if found != expected:
        raise FormatError(f"{origin}: schema: expected {expected!r}, found {found!r}")
    try:
        value = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{origin}: {_field_first(str(error), document)}") from None
    if missing := _first_missing(document, msgspec.to_builtins(value)):
        raise FormatError(f"{origin}: {missing} is missing; files have no defaults")
    return value


def dumps(value: AnyValue) -> str:
    document = {"schema": SCHEMAS[type(value)], **msgspec.to_builtins(value)}
    return _one_row_per_item(document)


def write(path: str | os.PathLike[str], value: AnyValue) -> None:
    """The whole file or nothing, such as ``write("trace.json", trace)``."""
    if type(value) not in SCHEMAS:
        kinds = ", ".join(one.__name__ for one in SCHEMAS)
        raise RequestError(
            f"write(path, value): value must be one of {kinds}, got a {type(value).__name__}"
        )
    write_text(path, dumps(value))


def read_text(path: str | os.PathLike[str]) -> str:
    """A file's text, whatever it says; FormatError where it is not one."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: not a text file ({error.reason} at byte {error.start})"
        ) from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """The whole text or nothing: an interrupted write leaves what was there before."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write to, which takes the place of ``path`` where the block ends well."""
    if not str(path) or "\0" in str(path):
        raise RequestError(f"{str(path)!r} is not a file; name one to write to, without null byte")
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        raise RequestError(f"{path} is not a file; name one to write to")
    # Not by number of process: in a shared folder other hosts write, too.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        if target.exists():
            partial.chmod(target.stat().st_mode & 0o7777)
        partial.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def _parsed(text: str, *, origin: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{origin}: not complete JSON ({error.msg} at line {error.lineno} "
            f"column {error.colno}); is the file truncated?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{origin}: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice and the last one win; a person meant one of them."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object")
    return document


def _field_first(message: str, document: Any) -> str:
    """msgspec ends with `` - at `$.tensors[3].elements```; people look for the field first."""
    message = message.replace("\n", "\\n")
    match = re.fullmatch(r"(.*) - at `\$\.?(.*?)`", message)
    if match is None:
        return message
    found = _look_up(document, match[2])
    value = f", the value is {found!r}" if isinstance(found, str | int | float) else ""
    return f"{match[2]}: {match[1]}{value}" if match[2] else f"{match[1]}{value}"


def _first_missing(found: Any, whole: Any, path: str = "") -> str | None:
    """The path of a key that ``found`` leaves to a default."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            place = f"{path}.{key}".lstrip(".")
            missing = place if key not in found else _first_missing(found[key], value, place)
            if missing:
                return missing
    elif isinstance(whole, list | tuple):
        for index, (one, value) in enumerate(zip(found, whole, strict=True)):
            if missing := _first_missing(one, value, f"{path}[{index}]"):
                return missing
    return None


def _look_up(document: Any, path: str) -> Any:
    try:
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            document = document[int(index)] if index else document[key]
    except (KeyError, IndexError, TypeError):
        return None
    return document


def _one_row_per_item(document: dict[str, Any]) -> str:
    """Short enough to read, and a changed tensor is a changed line in a diff."""
    fields = []
    for key, value in document.items():
        if isinstance(value, list | tuple) and value:
            rows = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            fields.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"

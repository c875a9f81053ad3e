"""Values as documents: JSON objects that name their schema, strict to read."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gradweave._src.checks import first_twice
from gradweave._src.errors import FormatError
from gradweave._src.upgrades import UPGRADES
from gradweave._src.vocabulary import is_writable, printable, quoted

Value = TypeVar("Value")

# Of what is wrong with a document: texts in it may be of any length.
LONGEST_COMPLAINT = 600
# What people call the document of a schema.
KINDS = {
    "gradweave.trace": "a trace",
    "gradweave.network": "a network",
    "gradweave.plan": "a plan",
    "gradweave.timeline": "a timeline",
    "gradweave.results": "a run's results",
    "gradweave.losses": "a run's losses",
    "gradweave.steps": "a training's steps",
    "gradweave.account": "an account of a training",
    "gradweave.recipe": "a recipe",
    "gradweave.remembered": "a remembered plan",
}


def to_document(value: object, schema: str) -> dict[str, Any]:
    return {"schema": schema, **msgspec.to_builtins(value)}


def from_document(document: Any, kind: type[Value], *, schema: str, origin: str) -> Value:
    """Return the value of a document of this schema, or of an older version of it.

    ``origin`` is what error messages call the document, which stays as it is.
    """
    origin = printable(origin)
    found = None
    if isinstance(document, Mapping):
        document = dict(document)
        found = document.pop("schema", None)
    while isinstance(found, str) and found in UPGRADES:
        found, upgrade = UPGRADES[found]
        document = upgrade(document)
    if found != schema:
        raise FormatError(f"{origin}: {_other_schema(found, schema)}")
    if (text := _first_unwritable(document)) is not None:
        raise FormatError(f"{origin}: {quoted(text)} is no text that can be written")
    try:
        value = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        said = printable(_field_first(str(error), document), most=LONGEST_COMPLAINT)
        raise FormatError(f"{origin}: {said}") from None
    if missing := _first_missing(document, msgspec.to_builtins(value)):
        raise FormatError(f"{origin}: {missing.lstrip('.')} is missing; files have no defaults")
    return value


def parsed(text: str, *, origin: str) -> Any:
    origin = printable(origin)
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        if _begins_as_something_else(text):
            raise FormatError(f"{origin}: this is not JSON") from None
        raise FormatError(
            f"{origin}: not complete JSON ({error.msg} at line {error.lineno} "
            f"column {error.colno}); is the file truncated?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{origin}: {error}") from None


def _other_schema(found: object, expected: str) -> str:
    """Say what a document is instead, where that is known, or which version of it."""
    kind, wanted = (KINDS.get(str(one).partition("/")[0]) for one in (found, expected))
    if kind is None or wanted is None or kind == wanted:
        return f"schema: expected {expected!r}, found {quoted(found)}"
    return f"this is {kind}, not {wanted}"


def _begins_as_something_else(text: str) -> bool:
    """Return whether it is no part of a document; one that was lost in a crash may be zeros."""
    first = text.lstrip()[:1]
    return first.isprintable() and first not in {"", "{", "["}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice in an object: JSON lets the last win, and people meant one."""
    document = dict(pairs)
    if len(document) < len(pairs):
        twice = first_twice(key for key, _ in pairs)
        raise ValueError(f"key {quoted(twice)} stands twice in one object")
    return document


def _first_unwritable(document: Any) -> str | None:
    """Return the first text with half a character, such as ``\\ud800``: nothing can show it."""
    left = [document]
    while left:
        match left.pop():
            case str(text):
                if not is_writable(text):
                    return text
            case int() | float():  # nearly all there is, so before what takes longer to tell
                pass
            case Mapping() as inner:
                left += inner.keys()
                left += inner.values()
            case list() | tuple() as inner:
                left += inner
    return None


def _field_first(message: str, document: Any) -> str:
    """Put the field, with which msgspec's message ends, at its beginning, and add the value."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*?)`", message, re.DOTALL)
    if match is None:
        return message
    found = _look_up(document, match[2])
    value = f", the value is {quoted(found)}" if isinstance(found, str | int | float) else ""
    return f"{match[2]}: {match[1]}{value}" if match[2] else f"{match[1]}{value}"


def _first_missing(found: Any, whole: Any) -> str | None:
    """Return the path of the first key that ``found`` leaves to a default, behind a dot."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            if key not in found:
                return f".{key}"
            if isinstance(value, dict | list | tuple) and (
                missing := _first_missing(found[key], value)
            ):
                return f".{key}{missing}"
    elif isinstance(whole, list | tuple):
        for index, (one, value) in enumerate(zip(found, whole, strict=True)):
            if missing := _first_missing(one, value):
                return f"[{index}]{missing}"
    return None


def _look_up(document: Any, path: str) -> Any:
    try:
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            document = document[int(index)] if index else document[key]
    except (KeyError, IndexError, TypeError):
        return None
    return document


def one_row_per_item(document: dict[str, Any]) -> str:
    """Write JSON with a line for each item of a list, to be read and compared line by line."""
    fields = []
    for key, value in document.items():
        if isinstance(value, list | tuple) and value:
            rows = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            fields.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"

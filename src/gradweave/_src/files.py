"""Every value as a JSON file that names its schema; strict to read, written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from gradweave._src.documents import from_document, one_row_per_item, parsed, to_document
from gradweave._src.errors import FormatError, RequestError
from gradweave._src.network import Network
from gradweave._src.partials import partial_file
from gradweave._src.plan import Plan
from gradweave._src.recipe import RECIPE_SCHEMA, Recipe
from gradweave._src.remembered import Remembered
from gradweave._src.results import Losses, Results
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.training_record import Account, Steps
from gradweave._src.vocabulary import printable

Value = TypeVar(
    "Value", Trace, Network, Plan, Timeline, Results, Losses, Steps, Account, Recipe, Remembered
)
AnyValue = (
    Trace | Network | Plan | Timeline | Results | Losses | Steps | Account | Recipe | Remembered
)

SCHEMAS: dict[type, str] = {
    Trace: "gradweave.trace/2",
    Network: "gradweave.network/4",
    Plan: "gradweave.plan/3",
    Timeline: "gradweave.timeline/1",
    Results: "gradweave.results/2",
    Losses: "gradweave.losses/2",
    Steps: "gradweave.steps/1",
    Account: "gradweave.account/1",
    Recipe: RECIPE_SCHEMA,
    Remembered: "gradweave.remembered/3",  # new with every recipe; older ones are not read
}


def read(path: str | os.PathLike[str], kind: type[Value]) -> Value:
    """Read a JSON file of this kind, also one that an older version has written.

    Args:
        path: the file.
        kind: Trace, Network, Plan, Timeline or Recipe, or one of the kinds that a run folder has.

    Raises:
        FormatError: if it is not such a file; the line names the place that is wrong.
        RequestError: if there are no files of that kind.
        OSError: if it cannot be read.

    Examples:
        >>> gradweave.write("trace.json", gradweave.load_trace("resnet50"))
        >>> gradweave.read("trace.json", gradweave.Trace).name
        'resnet50'
    """
    if kind not in SCHEMAS:
        kinds = ", ".join(one.__name__ for one in SCHEMAS)
        raise RequestError(f"read(path, kind): kind must be one of {kinds}, got {kind!r}")
    return loads(read_text(path), kind, origin=str(path))


def holds(path: str | os.PathLike[str], kind: type[Value]) -> bool:
    """Whether the file names the schema of this kind, in any version."""
    document = parsed(read_text(path), origin=str(path))
    schema = document.get("schema") if isinstance(document, dict) else None
    return str(schema).partition("/")[0] == SCHEMAS[kind].partition("/")[0]


def loads(text: str, kind: type[Value], *, origin: str) -> Value:
    """Return the value in a text of JSON; ``origin`` is what error messages call the text."""
    return from_document(parsed(text, origin=origin), kind, schema=SCHEMAS[kind], origin=origin)


def dumps(value: AnyValue) -> str:
    return one_row_per_item(to_document(value, SCHEMAS[type(value)]))


def write(path: str | os.PathLike[str], value: AnyValue) -> None:
    """Write a value to a JSON file, all of it or nothing.

    Args:
        path: the file, which is replaced if it is there.
        value: a Trace, Network, Plan, Timeline or Recipe, or a value that a run folder has.

    Raises:
        RequestError: if such values have no files, or ``path`` is no file.
        OSError: if it cannot be written; what was there stays.

    Examples:
        >>> gradweave.write("network.json", gradweave.load_network("k80-10gbe"))
    """
    if type(value) not in SCHEMAS:
        kinds = ", ".join(one.__name__ for one in SCHEMAS)
        raise RequestError(
            f"write(path, value): value must be one of {kinds}, got a {type(value).__name__}"
        )
    write_text(path, dumps(value))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text, whatever it says; raise FormatError where it is not text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{printable(str(path))}: not a text file ({error.reason} at byte {error.start})"
        ) from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write the whole text or nothing: an interrupted write leaves what was there before."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give the block a file to write to, which replaces ``path`` where the block ends well.

    Whoever is killed at any moment leaves the old file or the new one: it is on the disk before it
    takes the place. Errors name ``path``, which alone people know.
    """
    if not str(path) or "\0" in str(path):
        raise RequestError(f"{str(path)!r} is not a file; name one to write to, without null byte")
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        raise RequestError(f"{path} is not a file; name one to write to")
    try:
        with partial_file(target) as partial:
            yield partial.file
            partial.file.flush()
            if target.exists():
                partial.path.chmod(target.stat().st_mode & 0o7777)
            os.fsync(partial.file.fileno())
            partial.path.replace(target)
        _keep_names(target.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _keep_names(folder: Path) -> None:
    """Sync a folder where that can be: a new name is part of its folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Files are written beside their target and moved there when complete; leftovers are removed.

A file or folder has a name of its own until it is whole, which no other process can have chosen:
in a shared folder other hosts and containers write, too, and their process ids may be the same. Its
writer holds a lock on it. A lock goes with its process, so whoever writes there next can tell what
was left behind by one that was killed, and clears it away.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

SUFFIX = ".partial"
# Of the name that it is for: with what we add, a disk still takes it.
MOST_CHARACTERS = 50


class PartialFile(NamedTuple):
    """A file that is being written: where it is, and what to write to."""

    path: Path
    file: BinaryIO


@contextmanager
def partial_file(target: Path) -> Iterator[PartialFile]:
    """Make an empty file beside ``target``, to be moved there; it is gone when the block ends."""
    prefix = _prefix(target.name)
    clear_away(target.parent, prefix)
    while True:
        path = _new_path(target.parent, prefix)
        # Nothing may be there, not even a link to somewhere else.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if not _is_locked(path, descriptor):
                continue
            try:
                yield PartialFile(path, file)
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """Make an empty folder in ``parent``, to move files from; it is gone when the block ends."""
    prefix = _prefix("folder")
    clear_away(parent, prefix)
    while True:
        path = _new_path(parent, prefix)
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # cleared away before it was locked
            continue
        try:
            if not _is_locked(path, descriptor):
                continue
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return
        finally:
            os.close(descriptor)


def clear_away(folder: Path, prefix: str) -> None:
    """Remove partial files with this prefix, except those that a process still writes."""
    with suppress(OSError), os.scandir(folder) as entries:
        left = [one for one in entries if _is_partial(one.name, prefix)]
        for entry in left:
            with suppress(OSError):
                _remove_if_nobodys(entry)


def _prefix(name: str) -> str:
    return f".{name[:MOST_CHARACTERS]}."


def _new_path(folder: Path, prefix: str) -> Path:
    return folder / f"{prefix}{secrets.token_hex(8)}{SUFFIX}"


def _is_partial(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.endswith(SUFFIX)


def _is_locked(path: Path, descriptor: int) -> bool:
    """Lock it, and return whether it is still there: somebody may have cleared it away before."""
    with suppress(OSError):  # on a disk without locks nobody clears anything away
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path.exists()


def _remove_if_nobodys(entry: os.DirEntry[str]) -> None:
    """Remove it; raise OSError where somebody writes to it, or nobody can tell."""
    is_folder = entry.is_dir(follow_symlinks=False)
    # Network disks lock what can be written to alone, and folders never.
    access = os.O_RDONLY if is_folder else os.O_RDWR
    descriptor = os.open(entry.path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
    finally:
        os.close(descriptor)

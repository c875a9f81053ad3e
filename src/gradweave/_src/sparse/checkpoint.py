"""States of sparsified training in a folder, one file for each rank.

``torch.load(weights_only=True)`` reads them: numbers, texts and tensors. torch writes a checksum of
each part of a file but never compares one, so we do before it reads: otherwise a bit that a disk
has flipped would become another gradient.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from gradweave._src.errors import FormatError, RequestError
from gradweave._src.files import replacing
from gradweave._src.sparse.residual import share_of
from gradweave._src.sparse.state_form import KINDS, require_state
from gradweave._src.vocabulary import printable

logger = logging.getLogger(__name__)


def save(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write this rank's state to its file in a folder, all of it or nothing, and return the file.

    A folder is for one checkpoint of all ranks.

    Args:
        state: what ``sparse_state_dict()`` of a wrapper or ``state_dict()`` of a hook's state
            returned.
        folder: is made where it is not there.

    Raises:
        OSError: if it cannot be written.

    Examples:
        >>> model = gradweave.DistributedDataParallel(model, compression="gtopk:0.01")
        >>> model(batch).sum().backward()
        >>> file = gradweave.sparse_checkpoint.save(model.sparse_state_dict(), "residuals")
        >>> state = gradweave.sparse_checkpoint.load("residuals", rank=0, ranks=1)
        >>> model.load_sparse_state_dict(state)
    """
    path = Path(folder) / _file_name(state["rank"], state["ranks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, _checksums():
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            # torch's writer tells of a full disk only that its position is wrong; the context has
            # the cause.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    return path


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch write checksums, which a user may have switched off for files of their own."""
    asked_for = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(asked_for)


def load(folder: str | os.PathLike[str], *, rank: int, ranks: int) -> dict[str, Any]:
    """Return the state for one of so many ranks, for ``load_sparse_state_dict``.

    Where there were as many when it was saved, only this rank's file is needed. Otherwise all files
    are, and residuals are redistributed: their sums over the ranks stay what they are, as do the
    means of velocities.

    Args:
        folder: what ``save`` was given.
        rank: this rank.
        ranks: how many there are now.

    Raises:
        RequestError: if files are missing, or of several trainings.
        FormatError: if a file is damaged.
    """
    names = [entry.name for entry in Path(folder).glob("sparse-*.pt")]
    counts = {int(match[1]) for name in names if (match := re.search(r"-of-(\d+)\.pt$", name))}
    if len(counts) != 1:
        found = f"states of {sorted(counts)} ranks" if counts else "no states"
        raise RequestError(
            f"{folder} has {found}; expected those of one number of ranks, such as "
            f"{_file_name(0, ranks)}"
        )
    (saved,) = counts
    if saved == ranks:
        return _read(folder, rank, ranks)
    states = [_read(folder, old, saved) for old in range(saved)]
    logger.warning("residuals of %d ranks are redistributed among %d", saved, ranks)
    return _for_rank(states, rank, ranks)


def _for_rank(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise RequestError(
            f"the states are of steps {steps}; take a checkpoint that all ranks have finished"
        )
    kept = [({kind for kind in KINDS if kind in state}, state["shapes"]) for state in states]
    if any(one != kept[0] for one in kept):
        raise RequestError("the states are not of one model; take a checkpoint of one training")
    state = {**states[0], "rank": rank, "ranks": ranks}
    for kind in KINDS:
        if kind in state:
            carried = [one[kind] for one in states]
            state[kind] = share_of(carried, rank, ranks, mean=kind == "velocities")
    return state


def _read(folder: str | os.PathLike[str], rank: int, ranks: int) -> dict[str, Any]:
    path = Path(folder) / _file_name(rank, ranks)
    state: dict[str, Any] = _unpacked(path)
    try:
        require_state(state)
    except RequestError as error:
        raise FormatError(f"{path}: {error}") from None
    if (state["rank"], state["ranks"]) != (rank, ranks):
        raise FormatError(
            f"{path}: the state of rank {state['rank']} of {state['ranks']}; has the file been "
            "renamed?"
        )
    return state


def _unpacked(path: Path) -> Any:
    try:
        _check_checksums(path)
        return torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}; the checkpoint is not complete") from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the file may be whole
        # torch's reader can fail anywhere, and in any way, on a file that was cut or changed.
        said = printable(str(error).partition("\n")[0])
        raise FormatError(f"{path}: not a file that torch.save wrote whole: {said}") from None


def _check_checksums(path: Path) -> None:
    """Raise BadZipFile where a part is not as it was written."""
    with ZipFile(path) as archive:
        if any(part.compress_type != ZIP_STORED for part in archive.infolist()):
            raise BadZipFile("a part is compressed, which torch.save does not do")
        if changed := archive.testzip():
            raise BadZipFile(f"{changed} has another checksum than when it was written")


def _file_name(rank: int, ranks: int) -> str:
    return f"sparse-{rank}-of-{ranks}.pt"

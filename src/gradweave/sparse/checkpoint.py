"""States of sparsified training in a folder, one file for each rank.

``torch.load(weights_only=True)`` reads them: numbers, texts and tensors.
"""

import logging
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradweave.errors import FormatError, RequestError
from gradweave.files import replacing
from gradweave.sparse.residual import share_of
from gradweave.sparse.training import SCHEMA

logger = logging.getLogger(__name__)


def save(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """This rank's file, whole or not at all. A folder is for one checkpoint of all ranks."""
    path = Path(folder) / _file_name(state["rank"], state["ranks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(dict(state), file)
    return path


def load(folder: str | os.PathLike[str], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state for one of so many ranks.

    Where there were as many when it was saved, only this rank's file is needed. Otherwise all files
    are, and residuals are redistributed: their sums over the ranks stay what they are, as do the
    means of velocities.
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
        return _read(Path(folder) / _file_name(rank, ranks))
    states = [_read(Path(folder) / _file_name(old, saved)) for old in range(saved)]
    logger.warning("residuals of %d ranks are redistributed among %d", saved, ranks)
    return _for_rank(states, rank, ranks)


def _for_rank(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise RequestError(
            f"the states are of steps {steps}; take a checkpoint that all ranks have finished"
        )
    state = {**states[0], "rank": rank, "ranks": ranks}
    for kind, mean in (("residuals", False), ("velocities", True)):
        if kind in state:
            state[kind] = share_of([one[kind] for one in states], rank, ranks, mean=mean)
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}; the checkpoint is not complete") from None
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).partition("\n")[0]
        raise FormatError(f"{path}: not a file that torch.save wrote whole: {first}") from None
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        schema = state.get("schema") if isinstance(state, dict) else None
        raise FormatError(
            f"{path}: not a state of sparsified training as this version saves it: schema "
            f"{schema!r}, expected {SCHEMA!r}"
        )
    return state


def _file_name(rank: int, ranks: int) -> str:
    return f"sparse-{rank}-of-{ranks}.pt"

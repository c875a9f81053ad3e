"""A training as torch.distributed.checkpoint saves and loads it, whole.

torch.distributed.checkpoint expects plain tensors to be the same on all ranks, fills templates and
ignores what they have no place for. So every part of a state says what it has (shards are parts of
tensors, residuals rows), has a place for everything before the first step, and is compared with
what was saved.
"""

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import Optimizer

from gradweave._src.checkpoint.kept_by_optimizers import parameters_of, plain_optimizer
from gradweave._src.checkpoint.optimizer_state import (
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state,
)
from gradweave._src.checkpoint.sparse_state import loaded_sparse_state, sparse_state
from gradweave._src.checkpoint.written_beside import WrittenBeside
from gradweave._src.errors import RequestError
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.flat.shards import OwnedPart
from gradweave._src.runtime.reporting.planning_wrapper import PlanningWrapper
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.torch_internals import uncompiled_name

logger = logging.getLogger(__name__)

SCHEMA = "gradweave.training/1"
KEY = "training"  # of a training in a checkpoint, unless the user chooses another
PREFIX = "module."  # of names in a wrapper


Check = Callable[[Mapping[str, Any]], None]  # raises RequestError


class Residuals(Protocol):
    """What sparsified training on torch's own wrapper carries over: ``hooks.SparseState``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainingState:
    """A training as one object to save: a wrapped model, its optimizers and its plan.

    Gradients that compression kept back are in it, too. Create it after the optimizers. ``save``
    and ``load`` keep it in a folder that all ranks see. In a checkpoint with other things it is one
    of them: ``dcp.save({"training": state, …})``. Call either on every rank, between two steps.
    What was saved with one number of ranks, plan or wrapper can be loaded with another; sparsified
    training on another number of ranks needs ``load``.

    Args:
        model: a wrapped model, by either wrapper of Gradweave's or by torch's own.
        *optimizers: all of its optimizers.
        sparse: the ``gradweave.hooks.SparseState`` of torch's own wrapper, if there is one.

    Raises:
        RequestError: if the model is not wrapped, or an optimizer keeps its state in another one
            or has parameters of another model.

    Examples:
        >>> model = gradweave.DistributedDataParallel(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = gradweave.TrainingState(model, optimizer)
        >>> state.save("checkpoints/step-0")
        >>> state.load("checkpoints/step-0")
    """

    def __init__(
        self,
        model: TorchDDP | ShardedDataParallel,
        *optimizers: Optimizer,
        sparse: Residuals | None = None,
    ) -> None:
        if not isinstance(getattr(model, "process_group", None), dist.ProcessGroup):
            raise RequestError(
                "TrainingState takes a wrapped model: DistributedDataParallel or "
                "ShardedDataParallel of Gradweave, or torch's own wrapper; got a "
                f"{type(model).__name__}"
            )
        self._model = model
        self._optimizers = [plain_optimizer(optimizer) for optimizer in optimizers]
        self._sparse = sparse
        if isinstance(model, DistributedDataParallel) and model.is_sparsified:
            self._sparse = _OfWrapper(model)
        self._names = {p: _name(name) for name, p in model.named_parameters()}
        for optimizer in self._optimizers:
            if any(parameter not in self._names for parameter in parameters_of(optimizer)):
                raise RequestError(
                    f"a parameter of {type(optimizer).__name__} is not the model's; make the "
                    "optimizer from the wrapper's parameters(), and a TrainingState for each model"
                )
        self._saved_ranks = model.process_group.size()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint of this alone; it is complete when all ranks have returned.

        Until then a checkpoint that was in the folder before stays as it was.
        """
        # torch knows what writes to places that are no folders of this machine.
        is_folder = FileSystemWriter.validate_checkpoint_id(folder)
        save(
            {KEY: self},
            checkpoint_id=folder,
            storage_writer=WrittenBeside(folder) if is_folder else None,
            process_group=self._model.process_group,
        )

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what ``save`` has written, with any number of ranks.

        Raises:
            RequestError: if it is another training's; nothing is changed then.
        """
        group = self._model.process_group
        for places, check in self._comparisons():  # loading what checks compare needs little memory
            found = {KEY: places}
            load(found, checkpoint_id=folder, process_group=group)
            check(found[KEY])
        try:
            self._saved_ranks = _saved_ranks(folder) or self._saved_ranks
            load({KEY: self}, checkpoint_id=folder, process_group=group)
        finally:
            self._saved_ranks = self._model.process_group.size()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.distributed.checkpoint saves it, and as it loads into it.

        It has places also for what optimizers keep only after their first step. Call it on every
        rank.
        """
        state: dict[str, Any] = {
            "schema": SCHEMA,
            "contents": self._contents(),
            "tensors": self._tensors(),
            "model": {_name(key): value for key, value in self._model.state_dict().items()},
            "optimizers": {
                str(number): optimizer_state(optimizer, self._names, self._owned)
                for number, optimizer in enumerate(self._optimizers)
            },
            "recipe": _recipe_text(self._model),
        }
        if self._sparse is not None:
            own = self._sparse.state_dict()
            state["sparse"] = sparse_state(own, saved_ranks=self._saved_ranks)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned, filled by a checkpoint. Call it on every rank.

        Raises:
            RequestError: if it is another training's; nothing is changed then.
        """
        for _, check in self._comparisons():
            check(state)
        keys = {_name(key): key for key in self._model.state_dict()}
        self._model.load_state_dict({keys[key]: value for key, value in state["model"].items()})
        for number, optimizer in enumerate(self._optimizers):
            load_optimizer_state(optimizer, self._names, state["optimizers"][str(number)])
            if isinstance(self._model, ShardedDataParallel):
                self._model.register_optimizer(optimizer)
        if self._sparse is not None:
            own = self._sparse.state_dict()
            self._sparse.load_state_dict(loaded_sparse_state(state["sparse"], own))

    def _comparisons(self) -> list[tuple[dict[str, Any], Check]]:
        """Return places for what identifies a training, each with the check that compares it."""
        model: dict[str, Any] = {"schema": "", "contents": "", "tensors": ()}
        optimizers = {str(n): {"kept": (), "groups": ()} for n in range(len(self._optimizers))}
        compared: list[tuple[dict[str, Any], Check]] = [(model, self._check_model)]
        if optimizers:
            compared.append(({"optimizers": optimizers}, self._check_optimizers))
        return compared

    def _check_model(self, state: Mapping[str, Any]) -> None:
        if state["schema"] != SCHEMA:
            raise RequestError(
                f"not a training as this version saves it: schema {state['schema']!r}, expected "
                f"{SCHEMA!r}"
            )
        if state["contents"] != self._contents():
            raise RequestError(
                f"the checkpoint has {state['contents']}, this training has {self._contents()}; "
                "make the same wrapper and optimizers"
            )
        found, own = dict(state["tensors"]), dict(self._tensors())
        for name in sorted(found.keys() | own.keys()):
            if found.get(name) != own.get(name):
                raise RequestError(
                    f"the checkpoint's model has {name!r} as {found.get(name, 'nothing')}, this "
                    f"one as {own.get(name, 'nothing')}; make the same model"
                )

    def _check_optimizers(self, state: Mapping[str, Any]) -> None:
        for number, optimizer in enumerate(self._optimizers):
            check_optimizer_state(optimizer, self._names, state["optimizers"][str(number)])

    def _tensors(self) -> tuple[tuple[str, str], ...]:
        """Return the names of the model's tensors, each with its type and shape in words."""
        return tuple(
            (_name(key), f"{value.dtype} of {tuple(value.shape)}")
            for key, value in self._model.state_dict().items()
            if isinstance(value, torch.Tensor)
        )

    def _contents(self) -> str:
        """Return in words what a state has; they can be read and compared."""
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        residuals = "residuals" if self._sparse is not None else "no residuals"
        return f"a model, optimizers ({kinds or 'none'}) and {residuals}"

    def _owned(self, name: str) -> OwnedPart | None:
        model = self._model
        return model.owned(name) if isinstance(model, ShardedDataParallel) else None


def saved_recipe(folder: str | os.PathLike[str], *, key: str = KEY) -> Recipe | None:
    """Return the recipe in a checkpoint, for ``plan`` of a wrapper; None where there is none.

    Each rank reads by itself. Where the checkpoint cannot be read, one line of the log says so, and
    None is returned.

    Args:
        folder: the checkpoint.
        key: what the TrainingState was saved as.

    Examples:
        >>> gradweave.saved_recipe("checkpoints/nowhere") is None
        True
    """
    template = {key: {"recipe": ""}}
    try:
        if f"{key}.recipe" not in _saved(folder):
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # on purpose
            load(template, checkpoint_id=folder, no_dist=True)
        text = template[key]["recipe"]
        return Recipe.from_text(text) if text else None
    except Exception as error:  # noqa: BLE001 it can be done without, and other ranks wait
        logger.warning("planning anew: checkpoint %s: %s", folder, error)
        return None


def _saved(folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return what a checkpoint says of each thing in it; nothing where there is no checkpoint."""
    try:
        return FileSystemReader(folder).read_metadata().state_dict_metadata
    except FileNotFoundError:
        return {}


def _saved_ranks(folder: str | os.PathLike[str]) -> int | None:
    """Return how many ranks' residuals a checkpoint has; None if there are no residuals."""
    rows = f"{KEY}.sparse.residuals.rows."
    sizes = [
        held.size
        for name, held in _saved(folder).items()
        if name.startswith(rows) and isinstance(held, TensorStorageMetadata)
    ]
    return sizes[0][0] if sizes else None


class _OfWrapper:
    """The residuals of our own wrapper."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return self._model.sparse_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_sparse_state_dict(state)


def _name(key: str) -> str:
    """Return the name that a parameter has where nothing is wrapped or compiled."""
    return uncompiled_name(key).removeprefix(PREFIX)


def _recipe_text(model: nn.Module) -> str:
    """Return the recipe as text; empty where planning has not come to one."""
    return model.account().recipe_text() if isinstance(model, PlanningWrapper) else ""

"""Accelerate: `accelerator.prepare` with our wrapper.

from gradweave.integrations.accelerate import use_gradweave
use_gradweave(accelerator)
"""

import logging
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import nn

from gradweave._src import files
from gradweave._src.errors import RequestError
from gradweave._src.integrations.made_wrappers import MadeWrappers, TellsOfWrappers
from gradweave._src.integrations.stand_in import in_torchs_place, stand_in

# In the folder of a state, one for each wrapped model that has one.
RECIPE_FILE = "gradweave_recipe_{place}.json"
# Up to a place that there can be: those in between are gone through.
_NAME_OF_RECIPE = re.compile(r"gradweave_recipe_(0|[1-9][0-9]{0,3})\.json")
_IN_USE = "gradweave_in_use"

logger = logging.getLogger(__name__)


class InUse(TellsOfWrappers):
    """The connection between one Accelerator and Gradweave; ``use_gradweave`` returns it.

    Models that this accelerator prepares are wrapped by Gradweave's class. Everything else in the
    process keeps torch's: torch's name stands for ours only while this accelerator wraps a model.
    ``undo()``, or the end of a ``with`` block, gives that back, too.
    """

    def __init__(self, accelerator: Accelerator, options: dict[str, Any]) -> None:
        if hasattr(accelerator, _IN_USE):
            raise RequestError("this accelerator uses gradweave already; call undo() of that first")
        self._made = MadeWrappers()
        self._class = stand_in(options, self._made.add)
        self._changed = ExitStack()  # of the accelerator
        self._change(accelerator)
        self.to_undo = ExitStack()  # with what others have changed for it
        self.to_undo.callback(self._changed.close)

    def _change(self, accelerator: Accelerator) -> None:
        self._accelerator, self._prepare_model = accelerator, accelerator.prepare_model
        accelerator.prepare_model = self._prepare
        setattr(accelerator, _IN_USE, self)
        self._changed.callback(accelerator.register_save_state_pre_hook(self._save).remove)
        self._changed.callback(accelerator.register_load_state_pre_hook(self._load).remove)
        self._changed.callback(delattr, accelerator, "prepare_model")
        self._changed.callback(delattr, accelerator, _IN_USE)

    def move_to(self, accelerator: Accelerator) -> None:
        """Connect this accelerator instead of the other, whose place it has taken."""
        self._changed.close()
        self._change(accelerator)

    def undo(self) -> None:
        """Let the accelerator wrap by torch's class again; what is wrapped stays as it is."""
        self.to_undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def keep_recipes(self, folder: str | os.PathLike[str]) -> None:
        """Write what is settled, one file for each model, which ``plan=`` can be given, too.

        What an earlier state in that folder had for other places goes.
        """
        texts = {place: text for place, text in enumerate(self._made.recipes()) if text}
        for place, text in texts.items():
            files.write_text(Path(folder, RECIPE_FILE.format(place=place)), text)
        for place, file in _recipe_files(folder).items():
            if place not in texts:
                file.unlink()

    def recall_recipes(self, folder: str | os.PathLike[str]) -> None:
        """Read what was kept there, for models that are prepared from now on.

        Where that cannot be read, one line in the log says why, and there are none: recipes are
        given by all ranks together, and one that raised would leave the others waiting.
        """
        texts: list[str] = []
        try:
            found = {place: files.read_text(file) for place, file in _recipe_files(folder).items()}
            texts = [found.get(place, "") for place in range(max(found, default=-1) + 1)]
        except Exception as error:  # noqa: BLE001 whatever it is, planning does without
            logger.warning("leaving recipes alone: %s", error)
        self._made.recall(texts)

    def begin_again(self) -> None:
        """Let models that are prepared from now on take the places of those that were."""
        self._made.begin_again()

    def _prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with in_torchs_place(self._class):
            prepared: nn.Module = self._prepare_model(model, *args, **kwargs)
        return prepared

    def _save(self, models: object, weights: object, folder: str) -> None:
        del models, weights
        if self._accelerator.is_main_process:
            self.keep_recipes(folder)

    def _load(self, models: object, folder: str) -> None:
        del models
        if self._accelerator.is_main_process:  # whose recipes count
            self.recall_recipes(folder)
        self._made.adopt_recalled()


def _recipe_files(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files of recipes by the places that they are for."""
    named = ((_NAME_OF_RECIPE.fullmatch(file.name), file) for file in Path(folder).glob("*.json"))
    return {int(name[1]): file for name, file in named if name is not None and file.is_file()}


def use_gradweave(accelerator: Accelerator, **options: Any) -> InUse:
    """Have ``accelerator.prepare`` wrap models by Gradweave's DistributedDataParallel.

    States that the accelerator saves hold the recipes of its models, and loading one begins with
    them.

    Args:
        accelerator: whose models are wrapped; call this before ``prepare``.
        **options: of gradweave.DistributedDataParallel, beside those of torch's that the
            accelerator gives.

    Returns:
        What tells what was found, by ``explain()``, ``findings()``, ``plan`` and ``recipe()``, and
        what ends it, by ``undo()``.

    Raises:
        RequestError: if this accelerator uses Gradweave already.

    Examples:
        With Accelerate:

            accelerator = Accelerator()
            in_use = use_gradweave(accelerator, precision="exact")
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            print(in_use.explain())  # after some hundred steps
    """
    return InUse(accelerator, options)

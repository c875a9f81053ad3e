"""Accelerate: `accelerator.prepare` with our wrapper.

from gradweave.integrations.accelerate import use_gradweave
use_gradweave(accelerator)
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import nn

from gradweave import files
from gradweave.errors import RequestError
from gradweave.integrations.made_wrappers import MadeWrappers, TellsOfWrappers
from gradweave.integrations.stand_in import in_torchs_place, stand_in

# In the folder of a state, one for each wrapped model.
RECIPE_FILE = "gradweave_recipe_{place}.json"
_IN_USE = "gradweave_in_use"


class InUse(TellsOfWrappers):
    """Our wrapper in the place of torch's, for the models that one accelerator prepares.

    Everything else in the process keeps torch's class: torch's name stands for ours only while this
    accelerator wraps a model. `undo()`, or the end of a ``with`` block, gives that back, too.
    """

    def __init__(self, accelerator: Accelerator, options: dict[str, Any]) -> None:
        if hasattr(accelerator, _IN_USE):
            raise RequestError("this accelerator uses gradweave already; call undo() of that first")
        self._made = MadeWrappers()
        self._accelerator, self._prepare_model = accelerator, accelerator.prepare_model
        self._class = stand_in(options, self._made.add)
        accelerator.prepare_model = self._prepare
        setattr(accelerator, _IN_USE, self)
        self.to_undo = ExitStack()  # with what others have changed for it
        self.to_undo.callback(accelerator.register_save_state_pre_hook(self._save).remove)
        self.to_undo.callback(accelerator.register_load_state_pre_hook(self._load).remove)
        self.to_undo.callback(delattr, accelerator, "prepare_model")
        self.to_undo.callback(delattr, accelerator, _IN_USE)

    def undo(self) -> None:
        """Let the accelerator wrap by torch's class again; what is wrapped stays as it is."""
        self.to_undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def keep_recipes(self, folder: str | os.PathLike[str]) -> None:
        """Write what is settled, one file for each model, which ``plan=`` can be given, too."""
        for place, text in enumerate(self._made.recipes()):
            if text:
                files.write_text(Path(folder, RECIPE_FILE.format(place=place)), text)

    def recall_recipes(self, folder: str | os.PathLike[str]) -> None:
        """Read what was kept there, for models that are prepared from now on."""
        texts: list[str] = []
        while (file := Path(folder, RECIPE_FILE.format(place=len(texts)))).is_file():
            texts.append(files.read_text(file))
        self._made.recall(texts)

    def begin_again(self) -> None:
        """Models that are prepared from now on take the places of those that were."""
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


def use_gradweave(accelerator: Accelerator, **options: Any) -> InUse:
    """Have ``accelerator.prepare`` wrap models by our class, with these options of it.

    What is returned tells what was found: `explain()`, `findings()`, `plan`, `recipe()`. States
    that the accelerator saves hold the recipes, and loading one begins with them.
    """
    return InUse(accelerator, options)

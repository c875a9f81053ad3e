"""Transformers: `Trainer.train` with our wrapper.

from gradweave.integrations.transformers import use_gradweave
use_gradweave(trainer)
"""

import weakref
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from gradweave._src.integrations.accelerate import InUse
from gradweave._src.integrations.accelerate import use_gradweave as use_with_accelerator
from gradweave._src.integrations.metrics import planning_metrics
from gradweave._src.session.findings import Stage


class GradweaveCallback(TrainerCallback):  # type: ignore[misc]
    """Logs what was found once it is settled, and keeps the recipe in every checkpoint."""

    def __init__(self, trainer: Trainer, in_use: InUse) -> None:
        self._trainer = weakref.ref(trainer)  # which has this
        self._in_use = in_use
        self._has_told = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._has_told = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Log what was found, one step late: planning's end is seen in the next forward pass."""
        del args, kwargs
        self._tell()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._tell()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del control, kwargs
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if state.is_world_process_zero and folder.is_dir():
            self._in_use.keep_recipes(folder)

    def _tell(self) -> None:
        in_use, trainer = self._in_use, self._trainer()
        if self._has_told or trainer is None or not in_use.accounts:
            return
        if in_use.findings().stage is Stage.SETTLED:
            self._has_told = True
            wants_log = trainer.control.should_log
            trainer.log(planning_metrics(in_use.findings()))
            trainer.control.should_log = wants_log  # the step's loss is logged as ever


def use_gradweave(trainer: Trainer, **options: Any) -> InUse:
    """Have ``trainer.train`` wrap its model by Gradweave's DistributedDataParallel.

    A training that is resumed from a checkpoint begins with the recipe that is in it.

    Args:
        trainer: whose model is wrapped; call this before ``train``.
        **options: of gradweave.DistributedDataParallel, beside those of torch's that the trainer
            gives.

    Returns:
        What tells what was found, by ``explain()``, ``findings()``, ``plan`` and ``recipe()``, and
        what ends it, by ``undo()``.

    Raises:
        RequestError: if the trainer's accelerator uses Gradweave already.

    Examples:
        With Transformers:

            trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
            in_use = use_gradweave(trainer)
            trainer.train()
            print(in_use.explain())
    """
    in_use = use_with_accelerator(trainer.accelerator, **options)
    callback, train = GradweaveCallback(trainer, in_use), trainer.train
    make_accelerator = trainer.create_accelerator_and_postprocess
    trainer.add_callback(callback)
    in_use.to_undo.callback(trainer.remove_callback, callback)

    def train_with_recipe(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)
        if folder:
            in_use.recall_recipes(folder)
        in_use.begin_again()  # if this wraps anew: with what an earlier training has found
        return train(resume_from_checkpoint, *args, **kwargs)

    def make_accelerator_with_ours() -> None:
        """Move ours to the accelerator that each trial of a hyperparameter search makes anew."""
        make_accelerator()
        in_use.move_to(trainer.accelerator)

    trainer.train = train_with_recipe
    trainer.create_accelerator_and_postprocess = make_accelerator_with_ours
    in_use.to_undo.callback(delattr, trainer, "train")
    in_use.to_undo.callback(delattr, trainer, "create_accelerator_and_postprocess")
    return in_use

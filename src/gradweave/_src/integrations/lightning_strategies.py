"""What turns a DDPStrategy of Lightning's into one with our wrapper, of either of its packages.

Lightning comes as `lightning` and as `pytorch_lightning`, whose classes are not the same; each has
a module of ours that puts these in front of its own.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gradweave._src.integrations.made_wrappers import MadeWrappers, TellsOfWrappers
from gradweave._src.integrations.metrics import planning_metrics
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.session.findings import Stage
from gradweave._src.torch_internals import awaits_first_static_pass, first_static_pass_was_sent

# In checkpoints: a text for each wrapped model, which loading with weights_only=True allows.
RECIPES = "gradweave_recipes"
NAME = "gradweave"
REGISTERED: dict[str, dict[str, Any]] = {
    NAME: {},
    f"{NAME}_find_unused_parameters_true": {"find_unused_parameters": True},
}


def register(registry: Any, strategy: type) -> None:
    """Let Lightning know the strategy by name."""
    for name, options in REGISTERED.items():
        registry.register(
            name,
            strategy,
            description="DDP whose buckets are planned while the model trains",
            override=True,  # a notebook's cell may run twice
            **options,
        )


def _wrapped(
    module: nn.Module, device_ids: list[int] | None, options: dict[str, Any]
) -> DistributedDataParallel:
    """Wrap as Lightning does: on a stream beside the default one where there are streams."""
    beside: AbstractContextManager[object] = nullcontext()
    if device_ids is not None:
        beside = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    with beside:
        return DistributedDataParallel(module, device_ids=device_ids, **options)


class ForTrainer(TellsOfWrappers):
    """What stands in front of Lightning's DDPStrategy, and wraps by our class.

    All options of our wrapper and of torch's are passed on. What was found is told by `explain()`,
    `findings()`, `plan` and `recipe()`, also after the training; loggers get it as numbers once it
    is settled. The recipe is in every checkpoint, and whoever resumes from one, or fits a second
    time, begins with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made = MadeWrappers()
        self._trainer: weakref.ref[Any] | None = None
        self._has_told = False

    def setup(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        super().setup(trainer)  # type: ignore[misc]

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        wrapper = _wrapped(model, self.determine_ddp_device_ids(), self._ddp_kwargs)  # type: ignore[attr-defined]
        self._has_told = False
        self._made.begin_again()
        self._made.add(wrapper)
        return wrapper

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._tell_loggers()
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Let Lightning send a static graph's first pass again after buckets have changed.

        It does so once, where backward runs inside of forward, and other buckets begin with a first
        pass again.
        """
        wrapper, is_awaited = self.model, False  # type: ignore[attr-defined]
        is_ours = isinstance(wrapper, DistributedDataParallel)
        if is_ours and hasattr(self, "_pl_static_graph_delay_done"):
            is_awaited = awaits_first_static_pass(wrapper)
            self._pl_static_graph_delay_done = not is_awaited
        super().post_backward(closure_loss)  # type: ignore[misc]
        if is_awaited and self._pl_static_graph_delay_done:
            first_static_pass_was_sent(wrapper)

    def teardown(self) -> None:
        self._tell_loggers()
        super().teardown()  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if any(recipes := self._made.recipes()):
            checkpoint = {**checkpoint, RECIPES: recipes}
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if recipes := checkpoint.pop(RECIPES, None):
            self._made.recall(recipes)
        return checkpoint

    def _tell_loggers(self) -> None:
        """Tell loggers what was found, once, when planning has settled."""
        if self._has_told or not self.accounts or self.findings().stage is not Stage.SETTLED:
            return
        self._has_told = True
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(planning_metrics(self.findings()), step=trainer.global_step)
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):  # TensorBoard's
                experiment.add_text("gradweave", self.explain(), trainer.global_step)


class ForFabric(TellsOfWrappers):
    """What stands in front of Fabric's DDPStrategy, and wraps by our class.

    All options of our wrapper and of torch's are passed on; a ``precision`` in words is the
    wrapper's, for Fabric's own is an object. Recipes of all models that were set up are in what
    `fabric.save` writes; `fabric.load` gives them to the same models, set up in the same order,
    before their first step.
    """

    def __init__(self, *args: Any, precision: Any = None, **kwargs: Any) -> None:
        is_ours = isinstance(precision, str)
        if is_ours:
            super().__init__(*args, **kwargs)
            self._ddp_kwargs["precision"] = precision  # type: ignore[attr-defined]
        else:
            super().__init__(*args, precision=precision, **kwargs)  # type: ignore[call-arg]
        self._made = MadeWrappers()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        wrapper = _wrapped(module, self._determine_ddp_device_ids(), self._ddp_kwargs)  # type: ignore[attr-defined]
        self._made.add(wrapper)
        return wrapper

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if any(recipes := self._made.recipes()):
            state = {**state, RECIPES: recipes}
        super().save_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        left: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._made.recall(left.pop(RECIPES, ()))
        self._made.adopt_recalled()
        return left

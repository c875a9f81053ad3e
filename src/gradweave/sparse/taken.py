"""Whether an optimizer has taken a step with some parameters."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class TakenSteps:
    """Two answers of ``so_far`` differ if a step was taken between them.

    torch's optimizers are watched, because fused ones change parameters without a trace. Whoever
    else changes parameters in place leaves one.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._steps = 0
        hook = register_optimizer_step_post_hook(partial(_note, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def so_far(self) -> tuple[int, int]:
        """Of optimizers, and of parameters."""
        return self._steps, sum(parameter._version for parameter in self._parameters)  # noqa: SLF001

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        # A fused optimizer is called in any case, and looks itself what GradScaler has found.
        skipped = getattr(optimizer, "found_inf", None)
        if not skipped and any(id(parameter) in self._ids for parameter in held):
            self._steps += 1


def _note(
    watching: "weakref.ref[TakenSteps]", optimizer: torch.optim.Optimizer, *_arguments: Any
) -> None:
    live = watching()
    if live is not None:
        live.note(optimizer)

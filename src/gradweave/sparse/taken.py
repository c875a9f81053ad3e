"""Whether an optimizer has taken a step with some parameters."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class TakenSteps:
    """Of torch's optimizers, which are watched: fused ones change parameters without a trace.

    Until one of them is seen, any change of a parameter in place counts: somebody else may do the
    steps.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._steps, self._is_watched = 0, False
        hook = register_optimizer_step_post_hook(partial(_note, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def so_far(self) -> tuple[int, int]:
        """Steps, and changes in place."""
        return self._steps, sum(parameter._version for parameter in self._parameters)  # noqa: SLF001

    def any_since(self, before: tuple[int, int]) -> bool:
        """Since ``so_far`` said so."""
        now = self.so_far()
        return now[0] != before[0] or (not self._is_watched and now != before)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) in self._ids for parameter in held):
            self._is_watched = True
            # A fused optimizer is called in any case, and looks itself what GradScaler has found.
            self._steps += not getattr(optimizer, "found_inf", False)


def _note(
    watching: "weakref.ref[TakenSteps]", optimizer: torch.optim.Optimizer, *_arguments: Any
) -> None:
    live = watching()
    if live is not None:
        live.note(optimizer)

"""Which parameters an optimizer has taken a step with."""

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from gradweave._src.step_hooks import watch_steps


class OptimizerSteps:
    """Watches with which parameters an optimizer has taken steps.

    Steps of torch's optimizers are watched, because fused ones change parameters without a trace.
    Parameters that no such optimizer has held so far may be stepped by something else: once the
    value of one of them changes, all of them count as stepped, for a step changes nothing where a
    gradient is zero. Values are compared with a copy, because torch does not count changes through
    ``parameter.data``.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._unwatched = {id(parameter): parameter for parameter in parameters}
        self._ids = frozenset(self._unwatched)
        self._stepped: set[int] = set()
        self._values: dict[int, torch.Tensor] = {}
        end = watch_steps(_nothing, partial(_note, weakref.ref(self)))
        weakref.finalize(self, end)

    def stepped(self) -> set[int]:
        """Return the ids of the parameters that a step has been taken with since ``forget``."""
        if any(not torch.equal(value, self._unwatched[key]) for key, value in self._values.items()):
            return self._stepped.union(self._unwatched)
        return self._stepped

    def forget(self) -> None:
        """Let only later steps count."""
        self._stepped = set()
        self._values = {key: one.detach().clone() for key, one in self._unwatched.items()}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ours = {id(parameter): parameter for parameter in held if id(parameter) in self._ids}
        for key in ours:
            self._unwatched.pop(key, None)
            self._values.pop(key, None)
        # A fused optimizer is called in any case, and looks itself what GradScaler has found.
        if ours and not getattr(optimizer, "found_inf", False):
            self._stepped.update(key for key, one in ours.items() if one.grad is not None)


def _nothing(optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: before a step there is nothing to note."""


def _note(watching: "weakref.ref[OptimizerSteps]", optimizer: torch.optim.Optimizer) -> None:
    live = watching()
    if live is not None:
        live.note(optimizer)

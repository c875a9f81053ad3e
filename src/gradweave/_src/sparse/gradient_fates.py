"""What has become of the gradients of a pass when the next one begins."""

import weakref
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradweave._src.sparse.optimizer_steps import OptimizerSteps
from gradweave._src.torch_internals import changes_in_place, when_backward_ends


class Fate(IntEnum):
    """What became of a parameter's gradient; where ranks differ, the largest counts."""

    DISCARDED = 0  # set to None or zero, and no optimizer has taken a step with it
    WAITING = 1  # still there: the next pass adds to it
    APPLIED = 2


class GradientFates:
    """Watches what becomes of the gradients of these parameters.

    A hook of each parameter runs before its gradient is written. So the first one of a backward
    pass, synchronised or not, sees all gradients as the user has left them, wherever ``zero_grad``
    was called; when the first bucket is full, gradients have been added to what was there. A
    gradient of zeros, which sparsified ones often are, has been zeroed if it has also been written
    to since the pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._steps = OptimizerSteps(self._parameters.values())
        self._decided: dict[str, Fate] = dict.fromkeys(parameters, Fate.APPLIED)
        self._left: dict[str, tuple[int, int]] = {}  # marks of gradients as the last pass left them
        self._pass: weakref.ref[_Pass] | None = None
        self._callbacks: list[Callable[[], object]] = []
        hook = partial(_begin, weakref.ref(self))
        handles = [
            one.register_hook(hook)  # type: ignore[no-untyped-call]
            for one in self._parameters.values()
        ]
        weakref.finalize(self, _remove, handles)

    def at_first_gradient(self, callback: Callable[[], object]) -> None:
        """Call it when the next backward pass begins."""
        self._callbacks.append(callback)

    def forget_callbacks(self) -> None:
        """Forget the callbacks of a forward pass that no backward pass has followed."""
        self._callbacks.clear()

    def now(self) -> dict[str, Fate]:
        """Return what has become of the last pass so far, by parameter."""
        if not self._is_in_pass():
            self._decide()
        return {name: self._decided.get(name, Fate.WAITING) for name in self._parameters}

    def begin(self) -> dict[str, Fate]:
        """Return the fates of the pass before, when a synchronised one begins."""
        fates = self.now()
        if not self._is_in_pass():
            self._steps.forget()
        self._decided = {}
        return fates

    def forget(self) -> None:
        """Forget the last pass, so that the gradients of none matter."""
        self._decided = dict.fromkeys(self._parameters, Fate.APPLIED)

    def begin_pass(self) -> None:
        """Note that a backward pass begins, before any gradient is written."""
        if self._is_in_pass():
            return
        self._decide()
        self._steps.forget()
        under_way = _Pass(self._note_gradients)
        self._pass = weakref.ref(under_way)
        when_backward_ends(under_way)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _is_in_pass(self) -> bool:
        under_way = None if self._pass is None else self._pass()
        return under_way is not None and not under_way.has_ended

    def _decide(self) -> None:
        """Decide as far as possible; later passes without synchronisation may decide the rest."""
        if len(self._decided) == len(self._parameters):
            return
        stepped = self._steps.stepped()
        written_to: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            if name in self._decided:
                continue
            if id(parameter) in stepped:
                self._decided[name] = Fate.APPLIED
            elif parameter.grad is None:
                self._decided[name] = Fate.DISCARDED
            elif self._left.get(name) != _version(parameter.grad):
                written_to[name] = parameter.grad
        for name in _zeroed(written_to):
            self._decided[name] = Fate.DISCARDED

    def _note_gradients(self) -> None:
        self._left = {
            name: _version(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }


class _Pass:
    """A backward pass under way. torch drops it with the pass, also with one that fails."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.has_ended = False
        self._at_end, self._rounds_left = at_end, 2

    def __call__(self) -> None:
        """Act a round later: first torch's wrapper writes gradients, then we what it leaves out."""
        if self._rounds_left:
            self._rounds_left -= 1
            when_backward_ends(self)
        else:
            self.has_ended = True
            self._at_end()


def _zeroed(gradients: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of those that are all zeros.

    Where gradients are zeroed in place without a step of an optimizer, the host waits for an
    accelerator here, once for all of them.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, gradient in gradients.items():
        by_device.setdefault(gradient.device, {})[name] = gradient.any()
    return [
        name
        for found in by_device.values()
        for name, is_any in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
        if not is_any
    ]


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a mark that changes when the tensor is another, or has been written to."""
    return id(tensor), changes_in_place(tensor)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _begin(watching: "weakref.ref[GradientFates]", gradient: torch.Tensor) -> None:
    del gradient
    live = watching()
    if live is not None:
        live.begin_pass()

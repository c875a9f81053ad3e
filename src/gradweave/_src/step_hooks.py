"""Seeing optimizers of torch's step, whosever they are, and updating some parameters first."""

from collections.abc import Callable, Collection
from inspect import unwrap
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradweave._src.torch_internals import is_only_hook_before_step

OnStep = Callable[[Optimizer], None]
UpdateFirst = Callable[[Optimizer], Collection[nn.Parameter]]


class _Watcher(NamedTuple):
    before: OnStep
    update_first: UpdateFirst | None
    after: OnStep


# Note: one hook for good
# torch goes through its dictionary of hooks in each step, and fails when that changes meanwhile: on
# another thread, or because a wrapper is collected as garbage in a hook. So there is one hook of
# ours before and one after each step, which stay, and go through copies. Garbage may be collected
# anywhere in here, too: who ends watching takes no lock.
_watchers: dict[object, _Watcher] = {}
_hooking = Lock()
_hooks: list[RemovableHandle] = []


def watch_steps(
    before: OnStep, after: OnStep, *, update_first: UpdateFirst | None = None
) -> Callable[[], None]:
    """Call these before and after each step of any optimizer; return what ends that.

    ``update_first`` may update parameters itself, by ``update``, and returns those that it has: the
    step leaves them alone. It is called only where a step is nothing but an update: without a
    closure, which computes gradients first, and without hooks of others, which may change them.
    """
    with _hooking:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_call_before))
            _hooks.append(register_optimizer_step_post_hook(_call_after))
    key = object()
    _watchers[key] = _Watcher(before, update_first, after)

    def end() -> None:
        _watchers.pop(key, None)

    return end


def update(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
    """Do what a step of the optimizer does to these parameters, without hooks.

    Right for optimizers that know their groups' settings and a state for each parameter, no more.
    """
    part = _with_parameters(optimizer, lambda parameter: parameter in parameters)
    with torch.no_grad():
        unwrap(type(optimizer).step)(part)


def _with_parameters(optimizer: Optimizer, has: Callable[[nn.Parameter], bool]) -> Optimizer:
    """Return an optimizer of some of the parameters that shares everything else with the given."""
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.param_groups = [
        {**group, "params": list(filter(has, group["params"]))} for group in optimizer.param_groups
    ]
    return part


def _call_before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    watchers = list(_watchers.values())
    for watcher in watchers:
        watcher.before(optimizer)
    _, *of_step = args
    has_closure = any(value is not None for value in (*of_step, *kwargs.values()))
    if has_closure or not is_only_hook_before_step(optimizer):
        return None
    updated: set[nn.Parameter] = set()
    for watcher in watchers:
        if watcher.update_first is not None:
            updated.update(watcher.update_first(optimizer))
    if not updated:
        return None
    rest = _with_parameters(optimizer, lambda parameter: parameter not in updated)
    return (rest, *of_step), kwargs


def _call_after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for watcher in list(_watchers.values()):
        watcher.after(optimizer)

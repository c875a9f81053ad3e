"""Seeing optimizers of torch's step, whosever they are."""

from collections.abc import Callable
from threading import Lock

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

OnStep = Callable[[Optimizer], None]

# Note: one hook for good
# torch goes through its dictionary of hooks in each step, and fails when that changes meanwhile: on
# another thread, or because a wrapper is collected as garbage in a hook. So there is one hook of
# ours before and one after each step, which stay, and go through copies. Garbage may be collected
# anywhere in here, too: who ends watching takes no lock.
_watchers: dict[object, tuple[OnStep, OnStep]] = {}
_hooking = Lock()
_hooks: list[RemovableHandle] = []


def watch_steps(before: OnStep, after: OnStep) -> Callable[[], None]:
    """Call these before and after each step of any optimizer; return what ends that."""
    with _hooking:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_call_before))
            _hooks.append(register_optimizer_step_post_hook(_call_after))
    key = object()
    _watchers[key] = (before, after)

    def end() -> None:
        _watchers.pop(key, None)

    return end


def _call_before(optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for before, _ in list(_watchers.values()):
        before(optimizer)


def _call_after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for _, after in list(_watchers.values()):
        after(optimizer)

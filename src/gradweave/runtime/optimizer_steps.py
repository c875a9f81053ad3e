"""Seeing optimizers of torch's step, whosever they are."""

from collections.abc import Callable
from threading import Lock

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OnStep = Callable[[Optimizer], None]

# Note: one hook for good
# torch goes through its dictionary of hooks in each step, and fails when that changes meanwhile: on
# another thread, or because a wrapper is collected as garbage in a hook. So there is one hook of
# ours before and one after each step, which stay, and look at tuples that are replaced as a whole.
_before: tuple[OnStep, ...] = ()
_after: tuple[OnStep, ...] = ()
_is_hooked = False
_lock = Lock()


def watch_steps(before: OnStep, after: OnStep) -> Callable[[], None]:
    """Call these before and after each step of any optimizer; return what ends that."""
    global _before, _after, _is_hooked  # noqa: PLW0603 torch's hooks are the process's, too
    with _lock:
        if not _is_hooked:
            register_optimizer_step_pre_hook(_call_before)
            register_optimizer_step_post_hook(_call_after)
            _is_hooked = True
        _before, _after = (*_before, before), (*_after, after)

    def end() -> None:
        global _before, _after  # noqa: PLW0603
        with _lock:
            _before = tuple(watcher for watcher in _before if watcher is not before)
            _after = tuple(watcher for watcher in _after if watcher is not after)

    return end


def _call_before(optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for watcher in _before:
        watcher(optimizer)


def _call_after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for watcher in _after:
        watcher(optimizer)

"""The one home for torch's private names: what each is for."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.nn.utils import clip_grad


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way has computed everything."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def changes_in_place(tensor: torch.Tensor) -> int:
    """Return how often the tensor has been written to; fused optimizers write without a trace."""
    return tensor._version  # noqa: SLF001


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the group's own; None, which is the backend's default, where it does not tell."""
    backend = group._get_backend(device)  # noqa: SLF001
    return getattr(getattr(backend, "options", None), "_timeout", None)


def unlisted_gloo_group(
    store: Store, *, rank: int, ranks: int, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Return a group that torch does not list: it goes, with its connections, when it is dropped.

    ``store`` is where its ranks meet, and must not have been used for another group.
    """
    gloo = dist.ProcessGroupGloo(store, rank, ranks, timeout or default_pg_timeout)
    group = dist.ProcessGroup(store, rank, ranks)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001
    group._register_backend(torch.device("cpu"), kind, gloo)  # noqa: SLF001
    return group


# --- Clipping -------------------------------------------------------------------------------------

ClippingCheck = Callable[[list[torch.Tensor]], None]
_clipping_checks: dict[object, ClippingCheck] = {}
# Not a plain lock: whoever ends watching may be garbage that is collected while somebody begins.
_replacing = RLock()
_total_norm: Callable[..., torch.Tensor] | None = getattr(clip_grad, "_get_total_norm", None)


def watch_clipping(check: ClippingCheck) -> Callable[[], None]:
    """Call it with all gradients that torch's clip_grad_norm_ is to clip; return what ends that.

    torch has no hook there, and whoever clips has mostly imported the function itself, so the one
    that computes the norm is replaced meanwhile. Where torch lacks it, nothing is checked.
    """
    key = object()
    with _replacing:
        _clipping_checks[key] = check
        _replace_total_norm()

    def end() -> None:
        with _replacing:
            _clipping_checks.pop(key, None)
            _replace_total_norm()

    return end


def _replace_total_norm() -> None:
    if _total_norm is not None:
        clip_grad._get_total_norm = (  # noqa: SLF001
            _checked_total_norm if _clipping_checks else _total_norm
        )


def _checked_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for check in list(_clipping_checks.values()):
        check(gradients)
    assert _total_norm is not None
    return _total_norm(gradients, *args, **kwargs)

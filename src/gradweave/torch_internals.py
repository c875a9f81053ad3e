"""The one home for torch's private names: what each is for."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way has computed everything."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


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

"""The one home for torch's private names: what each is for."""

import weakref
from collections.abc import Callable

import torch
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way has computed everything."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def changes_in_place(tensor: torch.Tensor) -> int:
    """Return how often the tensor has been written to; fused optimizers write without a trace."""
    return tensor._version  # noqa: SLF001


def is_in_join(wrapper: "weakref.ref[TorchDDP]") -> bool:
    """Whether some ranks may have run out of data: from the first ``join()`` on, for good.

    Whoever asks must not keep the wrapper alive, which has to die before its process group.
    """
    ddp = wrapper()
    return ddp is not None and bool(ddp._join_config.enable)  # noqa: SLF001

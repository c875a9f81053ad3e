"""Small things between an accelerator's memory and the host's.

Both directions go through pinned memory and are queued on the current stream, so nobody waits for
anything else that the accelerator has to do. torch keeps pinned memory until what was queued with
it is done. What is on the CPU already stays where it is.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from gradweave._src.device_order import Order, read_after
from gradweave._src.torch_internals import HOST

ALIGNED_BYTES = 8  # tensors in one copy begin at multiples of this, the size of the largest number


class HostCopy:
    """A tensor on its way to the host: copied where it was made, awaited where it is read.

    Making one does not wait. Reading waits for the copy, and for nothing that was queued after it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._tensor = tensor.detach()
        if tensor.device.type != "cpu":
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
            self._tensor = there.copy_(tensor.detach(), non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def read(self) -> torch.Tensor:
        """Return the copy when it is there, on the CPU the tensor itself."""
        if self._arrived is not None:
            read_after(self._arrived, Order.HOST_AFTER_COPY)
            self._arrived = None
        return self._tensor


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the host's tensors on the device, by one copy, for what the current stream does next.

    On the CPU these are the tensors themselves.
    """
    if device.type == "cpu":
        return list(tensors)
    room = (-(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for tensor in tensors)
    starts = list(accumulate(room, initial=0))
    here = torch.empty(starts[-1], dtype=torch.uint8, device=HOST, pin_memory=True)
    there = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    for tensor, part in zip(tensors, _parts(here, starts, tensors), strict=True):
        part.copy_(tensor)
    there.copy_(here, non_blocking=True)
    return _parts(there, starts, tensors)


def _parts(
    flat: torch.Tensor, starts: Sequence[int], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [
        flat[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(starts, like, strict=False)
    ]

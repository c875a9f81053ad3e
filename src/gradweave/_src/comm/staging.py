"""Small things between an accelerator's memory and the host's.

Both ways go through pinned memory and are enqueued on the current stream, so nobody waits for
anything else that the accelerator has to do. What is on the CPU already stays where it is.
"""

from collections import deque
from collections.abc import Sequence

import torch

ALIGNED_BYTES = 8  # whatever is put behind each other begins at a multiple of the largest number


class HostCopy:
    """A tensor on its way to the host: begun where the tensor was made, awaited where it is read.

    Between the two the caller does not wait; whoever reads waits for the copy, and for nothing that
    was enqueued after it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._tensor = tensor.detach()
        if tensor.device.type != "cpu":
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = there.copy_(tensor.detach(), non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def read(self) -> torch.Tensor:
        """Return it when it is there. On the CPU that is the tensor itself."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._tensor


class Uploads:
    """Tensors on their way from the host, with the memory that they leave from."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return them on the device, all by one copy, for what the current stream does next.

        On the CPU these are the tensors themselves.
        """
        if device.type == "cpu":
            return list(tensors)
        self._forget_those_that_have_left()
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        here = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        there = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        for tensor, part in zip(tensors, _parts(here, starts, tensors), strict=True):
            part.copy_(tensor)
        there.copy_(here, non_blocking=True)
        has_left = torch.Event(device)
        has_left.record()
        # Not every accelerator's allocator knows which of the host's memory it still reads.
        self._leaving.append((has_left, here))
        return _parts(there, starts, tensors)

    def _forget_those_that_have_left(self) -> None:
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()


def _parts(
    flat: torch.Tensor, starts: Sequence[int], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [
        flat[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(starts, like, strict=False)
    ]

"""Rounded to bfloat16 or float16. torch's own conversions are as fast as memory."""

import torch

WORD_BYTES = 4


class SixteenBits:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def nbytes(self, elements: int) -> int:
        return -(-elements * self.dtype.itemsize // WORD_BYTES) * WORD_BYTES

    def encode(
        self, values: torch.Tensor, message: torch.Tensor, *, dropped: torch.Tensor | None
    ) -> None:
        rounded = self._numbers(message, values)
        rounded.copy_(values)
        if dropped is not None:
            dropped.add_(values).sub_(rounded)

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(self._numbers(message, values))

    def add(self, message: torch.Tensor, values: torch.Tensor) -> None:
        values.add_(self._numbers(message, values))

    def _numbers(self, message: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return message.view(self.dtype)[: values.numel()]

"""Rounded to 8 bits: integers from -127 to 127, and a float32 scale for every 256 of them.

A message is its scales, then its integers. Where the largest of 256 numbers is not finite, their
scale is NaN, so that a loss scaler sees on every rank what one rank has. Where it is below 1e-36,
all of them are sent as zero.
"""

import logging
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from gradweave._src.compression import ELEMENTS_PER_SCALE
from gradweave._src.torch_internals import HOST

logger = logging.getLogger(__name__)

LARGEST = 127.0
# For smaller numbers, 127 times the reciprocal would not be finite.
SMALLEST = 1e-36
WORD_BYTES = 4


class EightBits:
    """Rounds by compiled loops on CPUs with numba, else by torch: slower, with the same bits."""

    def nbytes(self, elements: int) -> int:
        words = -(-elements // WORD_BYTES)
        return WORD_BYTES * (_scales(elements) + words)

    def encode(
        self, values: torch.Tensor, message: torch.Tensor, *, dropped: torch.Tensor | None
    ) -> None:
        scales, integers = _parts(message, values.numel())
        if kernels := _kernels(values.device.type):
            kernels.round_to_8_bits(
                values.numpy(),
                scales.numpy(),
                integers.numpy(),
                None if dropped is None else dropped.numpy(),
                ELEMENTS_PER_SCALE,
            )
            return
        groups = _in_groups(values)
        largest = groups.abs().amax(1, keepdim=True)
        is_number = largest.isfinite() & (largest >= SMALLEST)
        factor = torch.where(is_number, torch.full_like(largest, LARGEST) / largest, 0.0)
        scale = torch.where(is_number, largest / LARGEST, 0.0)
        is_finite = largest.isfinite()
        rounded = torch.where(is_finite, (groups * factor).round_(), 0.0)
        scales.copy_(torch.where(is_finite, scale, torch.nan).flatten())
        integers.copy_(rounded.flatten()[: values.numel()])
        if dropped is not None:
            error = torch.where(is_finite, groups - rounded * scale, 0.0)
            dropped.add_(error.flatten()[: values.numel()])

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        scales, integers = _parts(message, values.numel())
        if kernels := _kernels(values.device.type):
            kernels.write_8_bits(
                scales.numpy(), integers.numpy(), values.numpy(), ELEMENTS_PER_SCALE
            )
            return
        values.copy_(_numbers(scales, integers))

    def add(self, message: torch.Tensor, values: torch.Tensor) -> None:
        scales, integers = _parts(message, values.numel())
        if kernels := _kernels(values.device.type):
            kernels.add_8_bits(scales.numpy(), integers.numpy(), values.numpy(), ELEMENTS_PER_SCALE)
            return
        values.add_(_numbers(scales, integers))


def _scales(elements: int) -> int:
    return -(-elements // ELEMENTS_PER_SCALE)


def _parts(message: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales_end = WORD_BYTES * _scales(elements)
    integers = message[scales_end : scales_end + elements].view(torch.int8)
    return message[:scales_end].view(torch.float32), integers


@lru_cache(maxsize=8)
def _kernels(device_type: str) -> Any:
    """Import the compiled loops when first needed, in half a second; return None without numba."""
    if device_type != "cpu":
        return None
    why = "pip install 'gradweave[sparse]'"
    try:
        if find_spec("numba") is not None:
            return import_module("gradweave._src.comm.rounding.kernels")
    except ImportError as error:
        why = str(error)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("8-bit messages are rounded by torch, which takes longer: %s", why)
    return None


def _in_groups(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % ELEMENTS_PER_SCALE
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, ELEMENTS_PER_SCALE)


def _numbers(scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    scale = scales.repeat_interleave(ELEMENTS_PER_SCALE)[: integers.numel()]
    return integers.float().mul_(scale)


def compile_kernels() -> None:
    """Compile the loops, or load them from the cache, in seconds; call it before the first step."""
    form, values = EightBits(), torch.zeros(1, device=HOST)
    message = torch.empty(form.nbytes(1), dtype=torch.uint8, device=HOST)
    for dropped in (None, torch.zeros_like(values)):
        form.encode(values, message, dropped=dropped)
    form.decode(message, values)
    form.add(message, values)

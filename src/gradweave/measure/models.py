"""A model, its input and its loss from what a user writes on the command line."""

import importlib
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gradweave.errors import RequestError


def build_model(text: str) -> nn.Module:
    """``package.module:factory``, called without arguments."""
    module_name, colon, factory_name = text.partition(":")
    if not colon:
        raise RequestError(f"{text!r} names no factory; write it as package.module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"cannot find the model {text!r}: {error}") from None
    model = factory()
    if not isinstance(model, nn.Module):
        raise RequestError(f"{text!r} returned a {type(model).__name__}, not a torch module")
    return model


def random_input(text: str) -> torch.Tensor:
    """``32x3x224x224`` of random numbers, or ``32x128:50000`` of integers below 50000."""
    match = re.fullmatch(r"(\d{1,9}(?:x\d{1,9})*)(?::(\d{1,12}))?", text, re.ASCII)
    shape = [int(size) for size in match[1].split("x")] if match else []
    if match is None or 0 in shape or match[2] == "0":
        raise RequestError(
            f"{text!r} is no input; write 32x3x224x224, or 32x128:50000 for integers"
        )
    if match[2] is None:
        return torch.randn(shape)
    return torch.randint(int(match[2]), shape)


def loss_of(output: object) -> torch.Tensor:
    """The output's own loss, or the mean of whatever numbers it has."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [tensor.mean() for tensor in _tensors(output)]
    if not means:
        raise RequestError(f"the model returned {type(output).__name__} without any gradient")
    return torch.stack(means).sum()


def _tensors(output: object) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return _tensors(list(output.values()))
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in _tensors(part)]
    return []

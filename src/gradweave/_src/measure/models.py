"""A model, its input and its loss from what a user writes on the command line."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gradweave._src.errors import GradweaveError, RequestError
from gradweave._src.vocabulary import closest


def build_model(text: str) -> nn.Module:
    """Call the factory that ``package.module:factory`` names, and return its model."""
    module_name, _, factory_name = text.partition(":")
    if not module_name or not factory_name:
        raise RequestError(f"{text!r} names no factory; write it as package.module:factory")
    try:
        with telling(f"cannot import the model {text!r}"):
            module = importlib.import_module(module_name)
    except SystemExit:
        raise RequestError(
            f"importing {module_name} ended this process; put what it runs under if __name__ == "
            '"__main__"'
        ) from None
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        close = closest(factory_name, dir(module))
        meant = "; name a function or class" if close is None else f", did you mean {close}?"
        raise RequestError(f"{module_name!r} has no factory {factory_name!r}{meant}")
    with telling(f"{text!r} could not be called without arguments"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise RequestError(f"{text!r} returned a {type(model).__name__}, not a torch module")
    return model


def random_input(text: str) -> torch.Tensor:
    """Return random numbers for ``32x3x224x224``, integers below 50000 for ``32x128:50000``."""
    match = re.fullmatch(r"(\d{1,9}(?:x\d{1,9})*)(?::(\d{1,12}))?", text, re.ASCII)
    shape = [int(size) for size in match[1].split("x")] if match else []
    if match is None or 0 in shape or match[2] == "0":
        raise RequestError(
            f"{text!r} is no input; write 32x3x224x224, or 32x128:50000 for integers"
        )
    with telling(f"there is no input {text!r}"):
        if match[2] is None:
            return torch.randn(shape)
        return torch.randint(int(match[2]), shape)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Make any error of a user's code one line that begins with ``what``."""
    try:
        yield
    except GradweaveError:
        raise
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise RequestError(f"{what}: {type(error).__name__}{said and ': '}{said}") from error


def loss_of(output: object) -> torch.Tensor:
    """Return the output's own loss, or the mean of all numbers in it."""
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

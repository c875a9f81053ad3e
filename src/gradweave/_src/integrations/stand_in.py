"""A class that stands where torch's wrapper stood, for code that cannot be changed."""

from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.parallel
import torch.nn.parallel.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.runtime.ddp import DistributedDataParallel

# Who holds torch's class by name; libraries take it from here when they are imported or used.
HOMES = (torch.nn.parallel, torch.nn.parallel.distributed)
NAME = "DistributedDataParallel"

OnMade = Callable[[DistributedDataParallel], None]


class _InTorchsPlace(ABCMeta):
    """The metaclass of a class that stands for torch's: torch's instances count as its own.

    Subclass checks stay as they are: Python asks all that are derived from ours whether they have
    something for a subclass, and so torch's wrappers would become ours.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        if _stands_in(cls):
            return TorchDDP in instance.__class__.__mro__
        return super().__instancecheck__(instance)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set what torch notes on its class, such as whose forward runs, on torch's own class."""
        if _stands_in(cls) and name in vars(TorchDDP) and not name.startswith(("__", "_abc_")):
            setattr(TorchDDP, name, value)
        else:
            super().__setattr__(name, value)


def _stands_in(cls: type) -> bool:
    """Return whether this is a stand-in itself, not a class that a script derives from one."""
    return "stands_for_torchs" in vars(cls)


def stand_in(options: Mapping[str, Any], on_made: OnMade) -> type[DistributedDataParallel]:
    """Return our class with these options, to be called as torch's is; what a call says wins.

    ``on_made`` is told of every wrapper. Copies of one, and pickles, are of our class itself, or of
    the class that a script has derived from it.
    """

    class InTorchsPlace(DistributedDataParallel, metaclass=_InTorchsPlace):
        stands_for_torchs = True

        def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **{**options, **kwargs})
            on_made(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            if _stands_in(type(self)):
                return _empty_wrapper, (), self.__getstate__()
            return super().__reduce_ex__(protocol)

    InTorchsPlace.__name__ = InTorchsPlace.__qualname__ = NAME  # as it is printed
    return InTorchsPlace


def _empty_wrapper() -> DistributedDataParallel:
    """Return a wrapper for pickle to fill, which cannot find a stand-in by its name."""
    return DistributedDataParallel.__new__(DistributedDataParallel)


@contextmanager
def in_torchs_place(replacement: type) -> Iterator[None]:
    """Give this class to whoever asks torch for its wrapper, for the length of a block."""
    before = [getattr(home, NAME) for home in HOMES]
    for home in HOMES:
        setattr(home, NAME, replacement)
    try:
        yield
    finally:
        for home, torchs in zip(HOMES, before, strict=True):
            setattr(home, NAME, torchs)

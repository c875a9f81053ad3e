"""What torch's wrapper takes, and what it would make of it."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe


def torch_names() -> list[str]:
    """Return the names of what torch's wrapper takes by position, behind the model."""
    return list(inspect.signature(TorchDDP.__init__).parameters)[2:]


def known_options(wrapper: type[TorchDDP]) -> list[str]:
    """Return the names of all options of a wrapper of ours, its own and torch's."""
    own = inspect.signature(wrapper.__init__).parameters.values()
    return [*(one.name for one in own if one.kind is one.KEYWORD_ONLY), *torch_names()]


def asked_group(torch_options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group that torch's wrapper will have; None where torch will refuse to wrap."""
    group, mesh = torch_options.get("process_group"), torch_options.get("device_mesh")
    if group is None and isinstance(mesh, DeviceMesh):
        group = mesh.get_group(0)
    elif group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


def check_positions(torch_arguments: tuple[Any, ...], given_twice: Collection[str]) -> None:
    """Refuse what cannot have been meant for torch by its position, or was given by name, too."""
    for found in torch_arguments:
        if isinstance(found, Plan | Recipe):
            raise RequestError(
                f"behind the model stand torch's own arguments; write plan= before the "
                f"{type(found).__name__}"
            )
    for name in given_twice:
        raise TypeError(f"DistributedDataParallel got multiple values for argument {name!r}")
    most = len(torch_names())
    if len(torch_arguments) > most:
        raise TypeError(f"DistributedDataParallel takes at most {most + 1} arguments")

"""What belongs to a wrapper of torch's: its parameters, and groups of its ranks."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.comm.communicator import subgroups_of
from gradweave.errors import RequestError


def planned_parameters(ddp: TorchDDP) -> dict[str, nn.Parameter]:
    """Whose gradients travel."""
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


def check_compressible(module: nn.Module) -> None:
    """Before anything is built: a gradient that is sparse already cannot be selected from."""
    for name, part in module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and part.weight.requires_grad:
            raise RequestError(
                f"{name or type(part).__name__!r} has sparse gradients, which travel by themselves;"
                " use sparse=False there, or leave out compression"
            )


def same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, which all of them must ask for."""
    made = subgroups_of(group)(list(range(group.size())))
    assert made is not None
    return made

"""What belongs to a wrapper of torch's: its parameters, and groups of its ranks."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.comm.communicator import subgroups_of


def planned_parameters(ddp: TorchDDP) -> dict[str, nn.Parameter]:
    """Whose gradients travel."""
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


def same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, which all of them must ask for."""
    made = subgroups_of(group)(list(range(group.size())))
    assert made is not None
    return made

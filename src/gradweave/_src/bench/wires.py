"""Models whose gradients are made smaller on the wire, by us and by torch, for real training."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.bench.peer_plans import POWER_SGD, power_sgd_rank
from gradweave._src.bench.peers import POWER_SGD_BEGINS, InTurn, in_turn
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.compression import check_precision
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.vocabulary import parse_spec

# 8 bits without error feedback: what rounding drops is lost.
FORGETFUL = "int8-forgetful"


def wrapped(model: nn.Module, wire: str, group: dist.ProcessGroup) -> TorchDDP:
    """Wrap a model by a precision of ours, ``int8-forgetful`` or ``powersgd:RANK``."""
    if wire == FORGETFUL:
        ddp = TorchDDP(model, process_group=group)
        ddp.register_comm_hook(OwnGroup(group, None), _round_and_forget)
        return ddp
    if parse_spec(wire).name == POWER_SGD:
        ddp = TorchDDP(model, process_group=group)
        # Later than in a benchmark of speed: torch advises some exact steps before.
        state = PowerSGDState(
            group,
            matrix_approximation_rank=power_sgd_rank(wire),
            start_powerSGD_iter=10 * POWER_SGD_BEGINS,
        )
        ddp.register_comm_hook(InTurn(state, ThreadPoolExecutor(1)), in_turn)
        return ddp
    check_precision(wire)
    return DistributedDataParallel(model, process_group=group, precision=wire)


def _round_and_forget(
    own_group: OwnGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    gradient: torch.Tensor = bucket.buffer().div_(own_group.group.size())

    def result(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()
        return gradient

    sent = own_group.thread().submit("all-reduce", gradient, collective="ring+int8")
    return sent.then(result)

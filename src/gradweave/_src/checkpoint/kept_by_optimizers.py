"""What an optimizer keeps for each parameter, also before its first step.

torch.distributed.checkpoint loads what it finds in a template, so state that an optimizer does not
have yet would silently not be restored. torch's own way out is a step with a learning rate of zero,
but that step counts. Here a twin of the optimizer takes the step, on parameters without memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src.errors import RequestError

Kept = dict[str, Any]

# Ways to compute a step: only the plainest one knows parameters without memory.
PLAINLY = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
META, HOST = torch.device("meta"), torch.device("cpu")


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate, Fabric and similar libraries."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    for held in vars(optimizer).values():
        if isinstance(held, Optimizer):
            raise RequestError(
                f"{type(optimizer).__name__} keeps its state in a {type(held).__name__} of its "
                "own, which only it can save; give TrainingState the optimizers themselves, and "
                "shard them by ShardedDataParallel"
            )
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kept_for(optimizer: Optimizer) -> Mapping[nn.Parameter, Kept]:
    """Return what is kept for each parameter, or what will be after its first step.

    Frozen parameters for which nothing is kept are left out: they may be most of a model.
    """
    every = [p for p in parameters_of(optimizer) if p.requires_grad or has_state(optimizer, p)]
    found = {p: optimizer.state[p] for p in every if has_state(optimizer, p)}
    return {**_kept_at_first(optimizer, [p for p in every if p not in found]), **found}


def has_state(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Return whether anything is kept yet; asking leaves no empty entry behind."""
    return bool(optimizer.state.get(parameter))


def _kept_at_first(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, Kept]:
    wanted = list(parameters)
    if not wanted:
        return {}
    for device in (META, HOST):  # some steps look at values, which are nowhere without memory
        try:
            kept = _after_a_step(optimizer, wanted, device)
        except Exception as error:  # noqa: BLE001 a user's class may raise anything
            failure = error
            continue
        return {p: {k: _with_memory(v, p.device) for k, v in kept[p].items()} for p in wanted}
    raise RequestError(
        f"what {type(optimizer).__name__} keeps for a parameter is unknown before its first step "
        f"({failure}); take a step, then ask for its state"
    ) from failure


def _after_a_step(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
) -> dict[nn.Parameter, Kept]:
    twins = {p: nn.Parameter(torch.zeros_like(p, device=device)) for p in parameters}
    for twin in twins.values():
        twin.grad = torch.zeros_like(twin)
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [
        {
            **group,
            **{name: value for name, value in PLAINLY.items() if name in group},
            "params": [twins[p] for p in group["params"] if p in twins],
        }
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    with torch.no_grad():
        unwrap(type(optimizer).step)(other)
    return {p: dict(other.state.get(twin, {})) for p, twin in twins.items()}


def _with_memory(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor) and value.device == META:
        return torch.zeros_like(value, device=device)
    return value

"""A plan that the user gives, in any of its forms."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradweave._src import files
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.wrapping.options import Options, check_plan

logger = logging.getLogger(__name__)

PlanSource = Plan | Recipe | str | os.PathLike[str]


def given_plan(
    plan: PlanSource | None,
    *,
    workers: int,
    device: torch.device,
    options: Options,
) -> Plan | Recipe | None:
    """Return the given plan; None where there is none, or it was made for something else."""
    if plan is None:
        return None
    if isinstance(plan, str | os.PathLike):
        plan = _read(plan)
    check_plan(plan.plan if isinstance(plan, Recipe) else plan, options)
    if not isinstance(plan, Recipe):
        return plan
    why = plan.why_not(workers=workers, device=device_name(device))
    if why is None:
        return plan
    logger.warning("planning again instead of using the recipe: %s", why)
    return None


def given_for_backward(
    source: PlanSource | None,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
) -> Plan | Recipe | None:
    """Return the plan that the user gives; None for one worker, which sends no messages."""
    if source is None or group is None or group.size() == 1:
        return None
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    given = given_plan(source, workers=group.size(), device=device, options=options)
    plan = plan_in(given)
    if plan is not None:
        check_backward_alone(plan)
    return given


def check_backward_alone(plan: Plan) -> None:
    """Refuse a plan for both passes."""
    if plan.passes == "both":
        raise RequestError(
            "the plan is one for both passes; wrap the model with ShardedDataParallel, or plan for "
            "backward"
        )


def plan_in(given: Plan | Recipe | None) -> Plan | None:
    """Return the plan that is to be carried out, of a plan or a recipe."""
    return given.plan if isinstance(given, Recipe) else given


def require_fit(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanMismatch unless it is for this model."""
    plan.check_fits({name: parameter.numel() for name, parameter in parameters.items()})


def _read(path: str | os.PathLike[str]) -> Plan | Recipe:
    if not Path(path).is_file():
        raise RequestError(f"plan: there is no file {path}")
    if files.holds(path, Recipe):
        return files.read(path, Recipe)
    return files.read(path, Plan)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type

"""A plan that the user gives, in any of its forms."""

import logging
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import files
from gradweave.errors import FormatError, RequestError
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.options import check_plan

logger = logging.getLogger(__name__)

PlanSource = Plan | Recipe | str | os.PathLike[str]


def given_plan(ddp: TorchDDP, plan: PlanSource | None) -> Plan | Recipe | None:
    """None where there is none, or where it was made for something else."""
    if plan is None:
        return None
    if isinstance(plan, str | os.PathLike):
        plan = _read(plan)
    check_plan(plan.plan if isinstance(plan, Recipe) else plan)
    if not isinstance(plan, Recipe):
        return plan
    why = plan.why_not(workers=ddp.process_group.size(), device=device_name(ddp.device))
    if why is None:
        return plan
    logger.warning("planning again instead of using the recipe: %s", why)
    return None


def _read(path: str | os.PathLike[str]) -> Plan | Recipe:
    if not Path(path).is_file():
        raise RequestError(f"plan: there is no file {path}")
    try:
        return files.read(path, Recipe)
    except FormatError as error:
        if "schema: expected" not in str(error):
            raise
        return files.read(path, Plan)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type

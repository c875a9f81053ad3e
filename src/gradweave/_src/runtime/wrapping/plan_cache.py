"""Plans that one run leaves to the next, in a folder that the user names.

Rank 0 alone reads and writes, so it is enough that its host sees the folder, and all ranks agree on
what it has read. Whatever is wrong with a folder or a file is one line in its log: then planning
goes on as if nothing had been remembered.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import gethostname
from typing import TypedDict

import torch
import torch.distributed as dist

from gradweave import __version__
from gradweave._src import files
from gradweave._src.comm.small_messages import (
    broadcast_text,
    first_to_say,
    gather_text,
)
from gradweave._src.errors import PlanMismatch
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.remembered import ParameterKey, PlanKey, Remembered, numbered
from gradweave._src.runtime.wrapping.options import Options
from gradweave._src.runtime.wrapping.plan_source import device_name
from gradweave._src.session.compression_worth import verdict
from gradweave._src.session.findings import Findings, Stage, recipe_of
from gradweave._src.session.task import LAST_STEP, PlanningTask
from gradweave._src.simulation import simulate

logger = logging.getLogger(__name__)

# The environment variable that names a folder where the script names none.
CACHE_VARIABLE = "GRADWEAVE_CACHE"
# A remembered plan is always watched, because networks and batches change between runs.
REMEMBERED_REPLAN_WHEN = 0.25


class Watching(TypedDict):
    """When a session plans again: fields of a PlanningTask."""

    replan_when: float | None
    watches_briefly: bool


class PlanCache:
    """One file of a folder; made on every rank, where all come alike.

    ``folder`` is rank 0's; nobody looks at others'. ``check`` raises where a wrapper cannot carry
    out a plan.
    """

    def __init__(
        self,
        folder: str,
        key: PlanKey,
        task: PlanningTask,
        *,
        is_rank_0: bool,
        check: Callable[[Plan], None],
    ) -> None:
        self._path = Path(folder, f"{key.digest}.json")
        self._key, self._task, self._check_plan = key, task, check
        self._is_rank_0 = self._keeps = is_rank_0
        self._seen: Plan | None = None  # which has been kept, or could not be

    def recalled(self, group: dist.ProcessGroup) -> Recipe | None:
        """Return what an earlier run has left; None on all ranks where that will not do."""
        text = self._read() if self._is_rank_0 else ""
        recipe, why = agreed_recipe(group, text, self._usable, reason=self._reason)
        if why:
            self._warn("planning anew", why)
        return recipe

    def keep(self, found: Findings) -> None:
        """Write what a session has found and settled on, once, on rank 0."""
        plan = found.plan
        is_chosen = found.stage is Stage.SETTLED and found.planning_steps is not None
        if not self._keeps or plan is None or not is_chosen or plan is self._seen:
            return
        self._seen = plan
        if not is_for_good(plan, self._task):
            return
        try:
            recipe = recipe_of(
                found, workers=self._task.workers, device=self._key.devices[0], why_not="unfinished"
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write(self._path, Remembered(key=self._key, recipe=recipe))
        except Exception as error:  # noqa: BLE001 training goes on
            self._warn("the next run plans anew", f"not written: {self._reason(error)}")

    def _read(self) -> str:
        """Return the file's text, or none where it will not do."""
        folder = self._path.parent
        try:
            if folder.is_file():
                self._keeps = False
                logger.warning("cache: %s is a file, not a folder; plans are not kept", folder)
                return ""
            text = files.read_text(self._path)
            self._usable(text)
        except FileNotFoundError:
            return ""
        except Exception as error:  # noqa: BLE001 training goes on, and other ranks wait
            # A file that cannot be read at all is not ours to replace.
            self._keeps = not isinstance(error, OSError)
            then = "planning anew" if self._keeps else "planning anew, and remembering nothing"
            self._warn(then, self._reason(error))
            return ""
        return text

    def _usable(self, text: str) -> Recipe:
        """Return the recipe, or raise for whatever reason it is not one for this wrapper."""
        remembered = files.loads(text, Remembered, origin=str(self._path))
        if why := remembered.key.why_not(self._key):
            raise PlanMismatch(why)
        check_recipe(remembered.recipe, self._task, check=self._check_plan)
        return remembered.recipe

    def _warn(self, then: str, why: str) -> None:
        if self._is_rank_0:
            logger.warning("%s: remembered plan %s: %s", then, self._path, why)

    def _reason(self, error: Exception) -> str:
        """Return the reason in one line, without the file's name."""
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return in_one_line(error, origin=str(self._path))


def in_one_line(error: Exception, *, origin: str = "") -> str:
    """Return what it says, without the ``origin`` that it may begin with."""
    text = str(error).removeprefix(f"{origin}: ")
    return " ".join(text.split()) or type(error).__name__


def agreed_recipe(
    group: dist.ProcessGroup,
    text: str,
    usable: Callable[[str], Recipe],
    *,
    reason: Callable[[Exception], str] = in_one_line,
) -> tuple[Recipe | None, str]:
    """Return what rank 0's text comes to on all ranks; None, and why, where it will not do.

    ``usable`` raises where it will not on this rank. Without a text there is no reason either.
    """
    text = broadcast_text(group, text)
    if not text:
        return None, ""
    recipe, why = None, ""
    try:
        recipe = usable(text)
    except Exception as error:  # noqa: BLE001 others have to be told
        why = reason(error)
    said = first_to_say(group, why)
    return (recipe, "") if said is None else (None, said)


def check_recipe(recipe: Recipe, task: PlanningTask, *, check: Callable[[Plan], None]) -> None:
    """Raise unless a session can begin with it; ``check`` raises where a wrapper cannot."""
    plan, trace, network = recipe.plan, recipe.trace, recipe.network
    if not is_for_good(plan, task):
        raise PlanMismatch("its plan is for another density")
    check(plan)
    # Sessions do both with a recipe; what they cannot do is refused here.
    simulate(trace, plan, network, workers=task.workers)
    verdict(trace, plan, network, workers=task.workers)


def is_for_good(plan: Plan, task: PlanningTask) -> bool:
    """Return whether it is for the last density, not for one that warms up."""
    last = None if task.compression_at is None else task.compression_at(LAST_STEP)
    found = {bucket.compression for bucket in plan.buckets if bucket.is_sparse}
    return found <= {last}


def open_cache(
    options: Options,
    task: PlanningTask,
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    check: Callable[[Plan], None],
    torch_flags: Mapping[str, bool],
) -> PlanCache | None:
    """Open the cache that rank 0 asks for; None on all ranks where it asks for none.

    It is asked in any case: a variable of the environment may be set on some hosts only.
    ``torch_flags`` are those of a PlanKey.
    """
    folder = _folder(options.cache)
    if not broadcast_text(group, "yes" if folder else ""):
        return None
    key = PlanKey(
        parameters=tuple(
            ParameterKey(name=name, shape=tuple(parameter.shape), dtype=str(parameter.dtype))
            for name, parameter in parameters.items()
        ),
        hosts=numbered(gather_text(group, gethostname())),
        devices=tuple(gather_text(group, device_name(device))),
        backend=group.name(),
        passes=task.passes,
        planner=options.planner,
        collective=options.collective,
        compression=None if options.compression is None else repr(options.compression),
        precision=options.precision,
        caps_bytes=task.baseline_caps_bytes,
        gradweave=__version__,
        torch=str(torch.__version__),
        **torch_flags,
    )
    return PlanCache(folder, key, task, is_rank_0=group.rank() == 0, check=check)


def watching(options: Options, *, is_remembered: bool) -> Watching:
    """Say when to plan again; a remembered plan is watched for a while even if nobody asks."""
    if options.replan_when is None and is_remembered:
        return Watching(replan_when=REMEMBERED_REPLAN_WHEN, watches_briefly=True)
    return Watching(replan_when=options.replan_when, watches_briefly=False)


def _folder(cache: str | os.PathLike[str] | None) -> str:
    """Return what this rank asks for, wherever the script goes from here; empty: nothing."""
    folder = os.environ.get(CACHE_VARIABLE, "") if cache is None else os.fsdecode(cache)
    try:
        return str(Path(folder).expanduser().absolute()) if folder else ""
    except (OSError, RuntimeError):  # nobody knows where home is, or here; reading will tell
        return folder

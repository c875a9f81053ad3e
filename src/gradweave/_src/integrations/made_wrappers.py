"""The wrappers that an integration has made: what they found, and recipes for the next ones."""

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from gradweave._src.comm.small_messages import gather_long_text
from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.reporting.account import PlanningAccount
from gradweave._src.session.findings import Findings


class MadeWrappers:
    """The wrappers in the order in which they were made; none of them is kept alive."""

    def __init__(self) -> None:
        self._accounts: list[PlanningAccount] = []
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self._recalled: Sequence[str] = ()
        self._awaits_wrappers = False  # what was recalled
        self._begins_again = False

    def add(self, wrapper: DistributedDataParallel) -> None:
        """Note a new wrapper, on every rank, and let it begin with the recipe for its place."""
        if self._begins_again:
            self._clear()
        place = len(self._accounts)
        self._accounts.append(wrapper.account())
        self._wrappers.append(weakref.ref(wrapper))
        wrapper.adopt(self._recalled[place] if place < len(self._recalled) else None)

    def begin_again(self) -> None:
        """Let wrappers that are made from now on take the places and recipes of earlier ones.

        Recipes that were recalled meanwhile count more. Until a wrapper is made, nothing changes.
        """
        self._begins_again = True

    def _clear(self) -> None:
        if not self._awaits_wrappers and any(recipes := self.recipes()):
            self._recalled = recipes
        self._awaits_wrappers = self._begins_again = False
        self._accounts, self._wrappers = [], []

    def recall(self, recipes: Sequence[str]) -> None:
        """Take recipes of an earlier run, as texts, for wrappers that are made from now on."""
        self._recalled, self._awaits_wrappers = tuple(recipes), True

    def adopt_recalled(self) -> None:
        """Give those to wrappers that were made before; on every rank, before their first step.

        One that is gone on any rank is left alone on all of them: adopting needs every rank.
        """
        wrappers = [reference() for reference in self._wrappers]
        are_everywhere = _agreed([wrapper is not None for wrapper in wrappers])
        for place, (wrapper, is_everywhere) in enumerate(
            zip(wrappers, are_everywhere, strict=False)
        ):
            if wrapper is not None and is_everywhere:
                wrapper.adopt(self._recalled[place] if place < len(self._recalled) else None)

    def recipes(self) -> list[str]:
        """Return what a checkpoint keeps: a text for each wrapper, empty where none is settled."""
        return [account.recipe_text() for account in self._accounts]

    @property
    def accounts(self) -> Sequence[PlanningAccount]:
        return tuple(self._accounts)

    @property
    def last(self) -> PlanningAccount:
        if not self._accounts:
            raise RequestError("no model was wrapped yet; train first")
        return self._accounts[-1]


def _agreed(are_there: Sequence[bool]) -> list[bool]:
    """Return which wrappers are alive on all ranks.

    Every rank calls it, for garbage is collected at different times.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return list(are_there)
    marks = "".join("1" if is_there else "0" for is_there in are_there)
    said = gather_long_text(group, marks)
    return [set(place) == {"1"} for place in zip(*said, strict=False)]


class TellsOfWrappers:
    """Tells of the last wrapper that an integration has made, also when that is gone."""

    _made: MadeWrappers

    @property
    def accounts(self) -> Sequence[PlanningAccount]:
        """The accounts of all models that were wrapped, in that order."""
        return self._made.accounts

    @property
    def plan(self) -> Plan | None:
        """What is carried out; None while it is being found, and where nothing is planned."""
        return self._made.last.plan

    def findings(self) -> Findings:
        """Return what planning has found out so far."""
        return self._made.last.findings()

    def explain(self) -> str:
        """Say what was measured, what was tried, what was chosen, and what it gains."""
        return self._made.last.explain()

    def recipe(self) -> Recipe:
        """Return what a restart can be given as ``plan``."""
        return self._made.last.recipe()

"""The wrappers that an integration has made: what they found, and recipes for the next ones."""

import weakref
from collections.abc import Sequence

from gradweave.errors import RequestError
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.account import PlanningAccount
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.session.findings import Findings


class MadeWrappers:
    """In the order in which they were made; none of them is kept alive."""

    def __init__(self) -> None:
        self._accounts: list[PlanningAccount] = []
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self._recalled: Sequence[str] = ()
        self._awaits_wrappers = False  # what was recalled
        self._begins_again = False

    def add(self, wrapper: DistributedDataParallel) -> None:
        """On every rank, when it has just been made; it begins with the recipe for its place."""
        if self._begins_again:
            self._clear()
        place = len(self._accounts)
        self._accounts.append(wrapper.account())
        self._wrappers.append(weakref.ref(wrapper))
        wrapper.adopt(self._recalled[place] if place < len(self._recalled) else None)

    def begin_again(self) -> None:
        """Those that come now take the places of those that were, and their recipes.

        Unless others were recalled meanwhile, which count. Until one comes, nothing changes.
        """
        self._begins_again = True

    def _clear(self) -> None:
        if not self._awaits_wrappers and any(recipes := self.recipes()):
            self._recalled = recipes
        self._awaits_wrappers = self._begins_again = False
        self._accounts, self._wrappers = [], []

    def recall(self, recipes: Sequence[str]) -> None:
        """Recipes of an earlier run, as texts, for wrappers that are made from now on."""
        self._recalled, self._awaits_wrappers = tuple(recipes), True

    def adopt_recalled(self) -> None:
        """Give those to wrappers that were made before; on every rank, before their first step."""
        for place, reference in enumerate(self._wrappers):
            wrapper = reference()
            if wrapper is not None:
                wrapper.adopt(self._recalled[place] if place < len(self._recalled) else None)

    def recipes(self) -> list[str]:
        """Return what a checkpoint keeps: a text for each wrapper, empty where none is settled."""
        return [_recipe_text(account) for account in self._accounts]

    @property
    def accounts(self) -> Sequence[PlanningAccount]:
        return tuple(self._accounts)

    @property
    def last(self) -> PlanningAccount:
        if not self._accounts:
            raise RequestError("no model was wrapped yet; train first")
        return self._accounts[-1]


def _recipe_text(account: PlanningAccount) -> str:
    try:
        return account.recipe().to_text()
    except RequestError:
        return ""


class TellsOfWrappers:
    """What whoever makes wrappers tells of the last of them, also when that is gone."""

    _made: MadeWrappers

    @property
    def accounts(self) -> Sequence[PlanningAccount]:
        """Of all models that were wrapped, in that order."""
        return self._made.accounts

    @property
    def plan(self) -> Plan | None:
        """What is carried out; None while it is being found, and where nothing is planned."""
        return self._made.last.plan

    def findings(self) -> Findings:
        """What planning has found out so far."""
        return self._made.last.findings()

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        return self._made.last.explain()

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self._made.last.recipe()

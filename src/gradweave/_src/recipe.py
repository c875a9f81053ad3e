"""What a restart can reuse: the plan, and what it was made from."""

from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct

from gradweave._src.documents import from_document, one_row_per_item, parsed, to_document
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.trace import Trace

RECIPE_SCHEMA = "gradweave.recipe/4"


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan is for one trace, one network, one number of workers and one kind of device."""

    workers: int
    device: str
    plan: Plan
    trace: Trace
    network: Network
    step_s: float | None  # what a training step took with it; None: nobody measured

    def why_not(self, *, workers: int, device: str) -> str | None:
        """What has changed since, in words; None where the plan still holds."""
        if self.workers != workers:
            return f"it was made for {self.workers} workers, not {workers}"
        if self.device != device:
            return f"it was made on {self.device}, not {device}"
        return None

    def to_text(self) -> str:
        """Return what a file of it has, for whatever keeps texts, such as a checkpoint."""
        return one_row_per_item(self.to_dict())

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the recipe of such a text, also of one that an older version has written."""
        return cls.from_dict(parsed(text, origin="recipe"))

    def to_dict(self) -> dict[str, Any]:
        """Return the same as numbers, texts, lists and dictionaries."""
        return to_document(self, RECIPE_SCHEMA)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the recipe of such a dictionary, also of an older version's."""
        return from_document(document, cls, schema=RECIPE_SCHEMA, origin="recipe")

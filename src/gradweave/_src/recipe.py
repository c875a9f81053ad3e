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
    """A plan with what it was made from: trace, network, number of workers and kind of device.

    ``recipe()`` of a wrapper returns one; give it, or a file of it, as ``plan`` of the next.

    Attributes:
        workers: how many there were.
        device: the kind of device, such as "cpu".
        plan: the plan that was chosen.
        trace: the gradients that it was made for.
        network: the costs that it was made with.
        step_s: seconds of a training step with it; None if nobody measured.

    Raises:
        FormatError: by ``from_text`` and ``from_dict``, if they are given something else.

    Examples:
        >>> trace, network = gradweave.load_trace("resnet50"), gradweave.load_network("k80-10gbe")
        >>> recipe = gradweave.Recipe(
        ...     workers=4,
        ...     device="cpu",
        ...     plan=gradweave.make_plan(trace, network, workers=4),
        ...     trace=trace,
        ...     network=network,
        ...     step_s=None,
        ... )
        >>> gradweave.Recipe.from_text(recipe.to_text()) == recipe
        True
    """

    workers: int
    device: str
    plan: Plan
    trace: Trace
    network: Network
    step_s: float | None

    def why_not(self, *, workers: int, device: str) -> str | None:
        """Say what has changed since, in words; None where the plan still holds."""
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

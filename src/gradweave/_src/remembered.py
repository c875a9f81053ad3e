"""What one run leaves to the next: a recipe, beside everything that its plan depends on."""

from collections.abc import Sequence
from hashlib import sha256
from math import prod

import msgspec
from msgspec import Struct

from gradweave._src.errors import PlanMismatch, RequestError
from gradweave._src.recipe import Recipe
from gradweave._src.vocabulary import Passes


class ParameterKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter, as far as a plan knows it.

    Attributes:
        name: what the model calls it.
        shape: of the whole parameter.
        dtype: torch's name of its type, such as "torch.float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class PlanKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a plan depends on: where any of it is another, so may be the best plan.

    It leaves out what only watching can tell, such as how large batches are and how busy the
    network is.

    Attributes:
        parameters: those whose gradients travel, in the order of declaration.
        hosts: for each rank the number of its host, counted from 0 as ranks are on them.
        devices: for each rank the kind of its device, such as "cpu".
        backend: what the process group sends by, such as "gloo".
        passes: beside which passes messages travel.
        planner: the planner that was asked for.
        collective: the collective that was asked for.
        compression: all of its settings, as Python writes them; None without.
        precision: what plans may change about results.
        caps_bytes: of the first bucket without a plan, and of all others.
        find_unused_parameters: torch's own option.
        static_graph: torch's own option.
        gradient_as_bucket_view: torch's own option.
        gradweave: which version of it.
        torch: which version of it.
    """

    parameters: tuple[ParameterKey, ...]
    hosts: tuple[int, ...]
    devices: tuple[str, ...]
    backend: str
    passes: Passes
    planner: str
    collective: str
    compression: str | None  # all of its settings, as Python writes them
    precision: str
    caps_bytes: tuple[int, int]
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    gradweave: str
    torch: str

    def __post_init__(self) -> None:
        if not self.hosts or len(self.hosts) != len(self.devices):
            raise RequestError(
                f"hosts and devices must be one for each rank, got {len(self.hosts)} and "
                f"{len(self.devices)}"
            )

    @property
    def digest(self) -> str:
        """A name for a file, which is the same for equal keys on any machine."""
        return sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def why_not(self, other: "PlanKey") -> str | None:
        """Say what the other one has that this one has not; None where they are equal."""
        fields = self.__struct_fields__
        changed = [name for name in fields if getattr(self, name) != getattr(other, name)]
        return f"it was made for other {', '.join(changed)}" if changed else None


class Remembered(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe that says what it is for, so that a file of any name cannot be mistaken.

    Attributes:
        key: what the recipe's plan depends on.
        recipe: what was found for it.
    """

    key: PlanKey
    recipe: Recipe

    def __post_init__(self) -> None:
        key, recipe, plan = self.key, self.recipe, self.recipe.plan
        if why := recipe.why_not(workers=len(key.hosts), device=key.devices[0]):
            raise PlanMismatch(f"recipe: {why}")
        if plan.passes != key.passes:
            raise PlanMismatch(f"recipe: its plan is for {plan.passes}, not for {key.passes}")
        plan.check_fits({parameter.name: prod(parameter.shape) for parameter in key.parameters})
        plan.check_describes(recipe.trace)


def numbered(hosts: Sequence[str]) -> tuple[int, ...]:
    """Number the hosts of ranks as they are first seen, from 0, whatever hosts are called."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)

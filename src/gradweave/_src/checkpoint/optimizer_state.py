"""An optimizer's state by parameters' names, in the shapes of whole parameters.

That state can be loaded with any number of ranks and any plan, and by either wrapper.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src.checkpoint.boxes import boxes_of
from gradweave._src.checkpoint.kept_by_optimizers import has_state, kept_for, parameters_of
from gradweave._src.checkpoint.part_of_tensor import PartOfTensor
from gradweave._src.errors import RequestError
from gradweave._src.runtime.flat.shards import OwnedPart, is_of_elements

# Says which part of a parameter this rank has; None where it has the whole.
Owned = Callable[[str], OwnedPart | None]


def optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], owned: Owned
) -> dict[str, Any]:
    """Return the state with a place for everything that it will ever have.

    Values that are no tensors stand in tuples, which torch.distributed.checkpoint keeps in one
    piece.
    """
    kept = {names[p]: values for p, values in kept_for(optimizer).items()}
    return {
        "state": {
            name: {key: _whole(value, owned(name)) for key, value in values.items()}
            for name, values in kept.items()
            if values
        },
        "kept": _what_is_kept(optimizer, names, kept),
        "groups": tuple(
            {**group, "params": tuple(names[parameter] for parameter in group["params"])}
            for group in optimizer.param_groups
        ),
    }


def load_optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Any]
) -> None:
    """Give the optimizer its part of what ``optimizer_state`` returned, filled by a checkpoint."""
    check_optimizer_state(optimizer, names, state)
    has_kept = {name for name, _, is_there in state["kept"] if is_there}
    own = {
        index: {key: _own(value) for key, value in state["state"][names[parameter]].items()}
        for index, parameter in enumerate(parameters_of(optimizer))
        if names[parameter] in has_kept
    }
    numbers = count()
    groups = [
        {**group, "params": [next(numbers) for _ in group["params"]]} for group in state["groups"]
    ]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def _what_is_kept(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    kept: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """Return for each parameter the keys of what is kept, and whether there is anything yet.

    The latter matters because loading zeros is not always the same as beginning with nothing.
    """
    return tuple(
        (names[p], tuple(sorted(kept.get(names[p], {}))), has_state(optimizer, p))
        for p in parameters_of(optimizer)
    )


def check_optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Any]
) -> None:
    """Raise unless ``kept`` and ``groups`` of a state are this optimizer's.

    A template ignores what it has no place for, so this must be compared.
    """
    kept = {names[p]: values for p, values in kept_for(optimizer).items()}
    found = [list(group["params"]) for group in state["groups"]]
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if found != groups:
        raise RequestError(
            f"the checkpoint's optimizer has {_described(found)}, this one {_described(groups)}; "
            "make it from the same parameters in the same order"
        )
    for name, keys, _ in state["kept"]:
        own = sorted(kept.get(name, {}))
        if list(keys) != own:
            raise RequestError(
                f"the checkpoint's optimizer keeps {_listed(keys)} for {name!r}, this one "
                f"({type(optimizer).__name__}) keeps {_listed(own)}; make the same "
                "one, with the same options"
            )


def _whole(value: Any, owned: OwnedPart | None) -> Any:
    """Return a value as torch.distributed.checkpoint saves it: as this rank's part of the whole."""
    if owned is None or not is_of_elements(value):
        return value
    if not owned.shape.numel():
        return value.new_zeros(owned.shape)
    boxes = boxes_of(owned.shape, owned.strides, owned.first, owned.last)
    return PartOfTensor.of(value, boxes, shape=owned.shape, strides=owned.strides)


def _own(value: Any) -> Any:
    if isinstance(value, PartOfTensor):
        return value.own
    return value


def _described(groups: list[list[str]]) -> str:
    sizes = ", ".join(str(len(group)) for group in groups)
    first = next((name for group in groups for name in group), "none")
    return f"groups of {sizes} parameters, the first one {first!r}"


def _listed(keys: tuple[str, ...] | list[str]) -> str:
    return ", ".join(keys) or "nothing"

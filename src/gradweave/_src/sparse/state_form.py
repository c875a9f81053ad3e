"""What a state of sparsified training is made of; states come from files, and so from anywhere."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from gradweave._src.checks import LARGEST
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import quoted

SCHEMA = "gradweave.sparse/2"
KINDS = ("residuals", "velocities")  # of what is carried over; the second only with momentum


def require_state(state: object) -> None:
    """Raise RequestError, which names what is wrong, unless it is a state of this version's."""
    found = state.get("schema") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or found != SCHEMA:
        raise RequestError(
            f"not a state of sparsified training as this version saves it: schema {quoted(found)}, "
            f"expected {SCHEMA!r}"
        )
    for problem in _problems(state):
        raise RequestError(f"not a state of sparsified training: {problem}")


def _problems(state: Mapping[str, Any]) -> Iterator[str]:
    for field in ("rank", "ranks", "step"):
        if not _is_count(state.get(field)):
            yield f"{field} must be a number >= 0, got {quoted(state.get(field))}"
    shapes = state.get("shapes")
    if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
        yield "shapes must be lists of sizes by parameter"
    elif not isinstance(state.get(KINDS[0]), Mapping):
        yield f"{KINDS[0]} are missing"
    else:
        for kind in KINDS:
            if kind in state:
                yield from _problems_of_carried(kind, state[kind], shapes)


def _problems_of_carried(kind: str, carried: Any, shapes: Mapping[str, Any]) -> Iterator[str]:
    match carried:
        case {"scale": float() | int() as scale, "values": Mapping() as values}:
            pass
        case _:
            yield f"{kind} must be a scale and values"
            return
    if not 0 < scale <= LARGEST:
        yield f"the scale of {kind} must be a positive number, got {quoted(scale)}"
    for name, value in values.items():
        if name not in shapes:
            yield f"{kind} are of {quoted(name)}, which has no shape"
        elif not isinstance(value, torch.Tensor) or not value.is_floating_point():
            yield f"{kind} of {quoted(name)} must be a tensor of floating-point numbers"
        elif list(value.shape) != list(shapes[name]):
            yield (
                f"{kind} of {quoted(name)} have shape {tuple(value.shape)}, not "
                f"{quoted(tuple(shapes[name]))}"
            )


def _is_shape(found: object) -> bool:
    return isinstance(found, list | tuple) and all(map(_is_count, found))


def _is_count(found: object) -> TypeGuard[int]:
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= LARGEST

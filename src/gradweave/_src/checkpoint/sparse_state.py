"""What every rank carries over in sparsified training, as tensors with a row for each rank.

With another number of ranks, rows are redistributed as ``gradweave.sparse_checkpoint`` does it: the
sums of residuals stay what they are, and so do the means of velocities.
"""

from collections.abc import Mapping
from typing import Any

import torch

from gradweave._src.checkpoint.boxes import Box
from gradweave._src.checkpoint.part_of_tensor import PartOfTensor
from gradweave._src.errors import RequestError

KEEPS_MEAN = {"residuals": False, "velocities": True}  # where False, the sum is kept


def sparse_state(own: Mapping[str, Any], *, saved_ranks: int) -> dict[str, Any]:
    """Return a rank's state, with places for the saved ranks' rows that it takes over."""
    taken_over = range(own["rank"], saved_ranks, own["ranks"])
    is_own = saved_ranks == own["ranks"]
    return {
        "schema": own["schema"],
        "step": own["step"],
        "ranks": own["ranks"],
        "shapes": _shapes(own),
        "kinds": _kinds(own),
        **{
            kind: {
                "scale": own[kind]["scale"],
                "rows": {
                    dtype: _rows(values, taken_over, saved_ranks, is_own=is_own)
                    for dtype, values in _by_type(own[kind]["values"]).items()
                },
            }
            for kind in _kinds(own)
        },
    }


def loaded_sparse_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank is to load of what ``sparse_state`` returned and a checkpoint has filled.

    ``own`` is the rank's present state.
    """
    if (state["shapes"], state["kinds"]) != (_shapes(own), _kinds(own)):
        raise RequestError(
            f"the checkpoint has {' and '.join(state['kinds'])} of {len(state['shapes'])} "
            f"parameters, the model needs {' and '.join(_kinds(own))} of {len(_shapes(own))}, or "
            "their shapes differ; wrap the same model with the same compression"
        )
    found = {**own, "schema": state["schema"], "step": state["step"]}
    for kind in _kinds(own):
        factor = own["ranks"] / state["ranks"] if KEEPS_MEAN[kind] else 1.0
        values: dict[str, torch.Tensor] = {}
        for dtype, of_type in _by_type(own[kind]["values"]).items():
            rows: PartOfTensor = state[kind]["rows"][dtype]
            row = rows.own.view(-1, rows.shape[1]).sum(0).mul_(factor)
            parts = torch.split(row, [value.numel() for value in of_type.values()])
            values |= {
                name: part.view(value.shape)
                for (name, value), part in zip(of_type.items(), parts, strict=True)
            }
        found[kind] = {"scale": state[kind]["scale"], "values": values}
    return found


def _rows(
    values: Mapping[str, torch.Tensor], taken_over: range, saved_ranks: int, *, is_own: bool
) -> PartOfTensor:
    flat = torch.cat([value.flatten() for value in values.values()])
    elements = flat.numel()
    boxes = [
        Box((row, 0), (1, elements), number * elements) for number, row in enumerate(taken_over)
    ]
    own = flat if is_own else flat.new_zeros(len(taken_over) * elements)
    return PartOfTensor.of(own, boxes, shape=(saved_ranks, elements), strides=(elements, 1))


def _by_type(values: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        found.setdefault(str(value.dtype).removeprefix("torch."), {})[name] = value
    return found


def _shapes(own: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(shape)) for name, shape in own["shapes"].items())


def _kinds(own: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(kind for kind in KEEPS_MEAN if kind in own)

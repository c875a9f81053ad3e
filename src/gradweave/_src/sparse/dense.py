"""Small tensors that travel whole beside the sparsified rest of their bucket."""

from collections.abc import Iterable, Sequence

import torch

from gradweave._src.sparse.residual import carried_type


def places_below(elements: Iterable[int], below: int) -> list[slice]:
    """Return where in a bucket those tensors lie that have fewer elements than ``below``."""
    places, first = [], 0
    for count in elements:
        if 0 < count < below:
            places.append(slice(first, first + count))
        first += count
    return places


def take_out(flat: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    """Return the elements there, one behind the other, ready to be summed, and leave zeros."""
    taken = torch.cat([flat[place] for place in places] or [flat[:0]])
    for place in places:
        flat[place] = 0
    return taken.to(carried_type(flat.dtype))


def put_back(whole: torch.Tensor, flat: torch.Tensor, places: Sequence[slice]) -> None:
    """Write back what ``take_out`` returned, rounded to the type that is there."""
    lengths = [place.stop - place.start for place in places]
    for place, part in zip(places, torch.split(whole, lengths), strict=True):
        flat[place] = part

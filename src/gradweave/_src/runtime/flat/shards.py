"""Each rank's part of every parameter, as an optimizer sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src.errors import RequestError
from gradweave._src.runtime.flat.buckets import FlatBucket, Piece
from gradweave._src.torch_internals import changes_in_place

Gather = Callable[[torch.Tensor, str], object]


class OwnedPart(NamedTuple):
    """Which elements of a parameter are a rank's, in the order in which its memory has them.

    ``ShardedDataParallel.owned`` returns one.

    Attributes:
        shape: the parameter's shape.
        strides: the parameter's strides in elements, without gaps.
        first: the first element that this rank updates.
        last: the element behind its last one; equal to ``first`` if it updates none.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    first: int
    last: int


class Place(NamedTuple):
    """Where a rank's part of a parameter is: elements of a bucket."""

    bucket: FlatBucket
    whole: Piece  # the parameter's
    own: tuple[int, int]

    def own_of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.own[0] : self.own[1]]

    def own_of_whole(self, parameter_like: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of something in the parameter's shape."""
        part = self.owned
        return self.whole.flattened(parameter_like)[part.first : part.last].clone()

    @property
    def owned(self) -> OwnedPart:
        first, last = (edge - self.whole.first for edge in self.own)
        return OwnedPart(self.whole.shape, self.whole.strides, first, last)


class Shards:
    """One flat parameter for each of the model's, which has this rank's elements of it, or none.

    The objects stay when buckets change; their memory does not, and neither do their elements.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._parameters = parameters
        self.by_name = {name: nn.Parameter(p.new_empty(0)) for name, p in parameters.items()}
        self._name_of = {shard: name for name, shard in self.by_name.items()}
        self._places: dict[str, Place] = {}
        self._shard_of = {full: self.by_name[name] for name, full in parameters.items()}
        self._changes_then: dict[nn.Parameter, int] = {}  # of shards' gradients, by parameter

    def lay_out(self, bucket: FlatBucket) -> None:
        """Make shards of the bucket's parameters views of it, and of no other any more."""
        for name, place in self._places_in(bucket).items():
            self._places[name] = place
            self.by_name[name].grad = None
            self.by_name[name].data = place.own_of(bucket.values)

    def _places_in(self, bucket: FlatBucket) -> dict[str, Place]:
        owned = bucket.owned_by(self._rank, self._ranks)
        return {
            name: Place(bucket, whole, own)
            for name, whole, own in zip(bucket.names, bucket.pieces, owned, strict=True)
        }

    def owned(self, name: str) -> OwnedPart:
        return self._places[name].owned

    def of(self, optimizer: Optimizer) -> set[nn.Parameter]:
        """Return those that the optimizer updates."""
        return self._name_of.keys() & set(_all_of(optimizer))

    def in_bucket(self, bucket: FlatBucket) -> set[nn.Parameter]:
        return {self.by_name[name] for name in bucket.names}

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Add gradients to those of shards, unless these were zeroed, as every backward pass does.

        A parameter that is frozen for a while gets none, and so optimizers leave it alone.
        """
        for name, place in self._places.items():
            if not self._parameters[name].requires_grad:
                continue
            shard, gradient = self.by_name[name], place.own_of(place.bucket.gradients)
            if shard.grad is None:
                shard.grad = gradient
            else:
                shard.grad.add_(gradient)

    def counted_gradients(self) -> list[torch.Tensor]:
        """Return gradients such that every element is on exactly one rank, for norms over all."""
        found = (
            self.by_name[name].grad
            for name, place in self._places.items()
            if place.bucket.passes == "both" or self._rank == 0
        )
        return [gradient for gradient in found if gradient is not None and gradient.numel()]

    def keep_gradients(self) -> None:
        """Copy gradients out of the buckets, which are about to be filled again."""
        for shard in self.by_name.values():
            if shard.grad is not None:
                shard.grad = shard.grad.clone()

    def note_added_up(self, parameter: nn.Parameter) -> None:
        """Note that a parameter has a gradient in its bucket that no other rank knows of yet.

        Optimizers zero gradients of shards, so there must be one that shows it.
        """
        shard = self._shard_of[parameter]
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
        self._changes_then[parameter] = changes_in_place(shard.grad)

    def is_discarded(self, parameter: nn.Parameter) -> bool:
        """Return whether the shard's gradient has been zeroed since something was added up."""
        then = self._changes_then.pop(parameter, None)
        if then is None:
            return False
        gradient = self._shard_of[parameter].grad
        if gradient is None:
            return True
        return changes_in_place(gradient) != then and not gradient.any()

    @contextmanager
    def moving(
        self, optimizers: Sequence[Optimizer], gather: Gather, *, to: Sequence[FlatBucket]
    ) -> Iterator[None]:
        """Keep gradients and optimizer state with their elements while a block calls ``lay_out``.

        It goes bucket by bucket: what all ranks have of an old one is gathered, each takes its part
        of the new ones, and the rest is forgotten. The old gradients are gone before the new
        buckets come.
        """
        new: dict[str, Place] = {}
        for bucket in to:
            new |= self._places_in(bucket)
        for optimizer in optimizers:
            self._move_elements(optimizer, gather, new)
        gradients = self._moved_gradients(gather, new)
        yield
        for name, gradient in gradients.items():
            self.by_name[name].grad = gradient

    def _move_elements(
        self, optimizer: Optimizer, gather: Gather, new: Mapping[str, Place]
    ) -> None:
        for name, key, whole in self._whole_elements(optimizer, gather):
            optimizer.state[self.by_name[name]][key] = new[name].own_of_whole(whole)

    def _moved_gradients(self, gather: Gather, new: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """Return gradients for the new places; all ranks gather, whatever is zeroed where."""
        found: dict[str, torch.Tensor] = {}
        for bucket in self._buckets():
            gradients = {name: self.by_name[name].grad for name in bucket.names}
            parts = {name: part for name, part in gradients.items() if part is not None}
            whole = self._gathered(bucket, parts, like=bucket.gradients, gather=gather)
            found |= {name: new[name].own_of_whole(one) for name, one in whole.items()}
            for name in bucket.names:
                self.by_name[name].grad = None
            bucket.drop_gradients()
        return found

    def whole_state(self, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
        """Return the optimizer's state dict as if it had all elements, on every rank.

        ``gather`` fills a bucket-sized tensor, of which each rank has its own part, by a bucket's
        collective.
        """
        state = optimizer.state_dict()
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for name, key, value in self._whole_elements(optimizer, gather):
            whole.setdefault(name, {})[key] = value.clone()
        for index, name in self.indices(optimizer).items():
            if index in state["state"]:
                state["state"][index] = {**state["state"][index], **whole.get(name, {})}
        return state

    def _whole_elements(
        self, optimizer: Optimizer, gather: Gather
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield what the optimizer has for each element, by parameter and name, in whole shapes.

        These are views of one bucket after the other, which the next one replaces.
        """
        names = [self._name_of[p] for p in _all_of(optimizer) if p in self._name_of]
        for bucket in self._buckets():
            states = {
                name: optimizer.state[self.by_name[name]] for name in names if name in bucket.names
            }
            keys = {
                key for state in states.values() for key, v in state.items() if is_of_elements(v)
            }
            for key in sorted(keys):
                parts = {name: state[key] for name, state in states.items() if key in state}
                like = next(iter(parts.values()))
                gathered = self._gathered(bucket, parts, like=like, gather=gather)
                for name, whole in gathered.items():
                    yield name, key, whole

    def _gathered(
        self,
        bucket: FlatBucket,
        parts: Mapping[str, torch.Tensor],
        *,
        like: torch.Tensor,
        gather: Gather,
    ) -> dict[str, torch.Tensor]:
        """Return all ranks' parts together, by parameter and in its shape: views of one tensor."""
        flat = like.new_zeros(bucket.numel)
        for name, part in parts.items():
            self._places[name].own_of(flat).copy_(part)
        if bucket.passes == "both":
            gather(flat, bucket.collective)
        return {name: self._places[name].whole.view(flat) for name in parts}

    def _buckets(self) -> Iterable[FlatBucket]:
        return dict.fromkeys(place.bucket for place in self._places.values())

    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of what ``whole_state`` gave, with any number of ranks."""
        names = self.indices(optimizer)
        own: dict[int, dict[str, Any]] = deepcopy(state["state"])
        # Numbers, such as the step, are tensors without dimensions, and are not cut into shards.
        keys = {
            key
            for values in own.values()
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        for index, name in names.items():
            place, shape = self._places[name], self._parameters[name].shape
            for key in keys.intersection(own.get(index, {})):
                value = own[index][key]
                if value.shape != shape:
                    raise RequestError(
                        f"state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                        f"has {tuple(shape)}; it is another model's"
                    )
                own[index][key] = place.own_of_whole(value)
        optimizer.load_state_dict({**state, "state": own})

    def indices(self, optimizer: Optimizer) -> dict[int, str]:
        """Return parameters' names by the numbers that state dicts have for them."""
        return {
            index: self._name_of[parameter]
            for index, parameter in enumerate(_all_of(optimizer))
            if parameter in self._name_of
        }


def _all_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def is_of_elements(value: object) -> bool:
    """Return whether it has a value for each element of a shard; the number of steps has not."""
    return isinstance(value, torch.Tensor) and value.dim() == 1

"""Optimizers' state dicts that say that they are of shards.

torch.distributed.checkpoint takes plain tensors for the same on all ranks and keeps one of them: of
a sharded optimizer's state most would be lost without a word. So what its state dict shows is
marked, and refused there. Everywhere else it is a plain tensor: computed with, copied, pickled.
"""

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.optim.optimizer import Optimizer

from gradweave._src.errors import RequestError
from gradweave._src.runtime.flat.shards import Shards, is_of_elements
from gradweave._src.torch_internals import plain_results

_REFUSED = (
    "%s is a shard, of which torch.distributed.checkpoint would keep one rank's for all; save "
    "gradweave.TrainingState(model, optimizer) instead"
)


class ShardOfState(torch.Tensor):
    """What an optimizer keeps for this rank's elements of a parameter."""

    __torch_function__ = plain_results  # type: ignore[assignment]

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        del value
        raise RequestError(_REFUSED % fqn)

    def data_ptr(self) -> NoReturn:
        """Refuse: ``async_save`` copies state by address before it asks what there is to write."""
        raise RequestError(_REFUSED % "an optimizer's state")

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return deepcopy(self.as_subclass(torch.Tensor), memo)


def mark_shards(optimizer: Optimizer, shards: Shards) -> Callable[[], None]:
    """Mark shards in the optimizer's state dicts from now on; return what ends that."""
    handles = [
        optimizer.register_state_dict_post_hook(partial(_mark, weakref.ref(shards))),
        optimizer.register_load_state_dict_pre_hook(_unmark),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _mark(
    watching: "weakref.ref[Shards]", optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any] | None:
    shards = watching()
    if shards is None:
        return None
    marked = {
        index: {
            key: value.as_subclass(ShardOfState) if is_of_elements(value) else value
            for key, value in state["state"][index].items()
        }
        for index in shards.indices(optimizer)
        if index in state["state"]
    }
    return {**state, "state": {**state["state"], **marked}}


def _unmark(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with plain tensors, for an optimizer computes with them."""
    del optimizer
    plain = {
        index: {
            key: value.as_subclass(torch.Tensor) if isinstance(value, ShardOfState) else value
            for key, value in kept.items()
        }
        for index, kept in state["state"].items()
    }
    return {**state, "state": plain}

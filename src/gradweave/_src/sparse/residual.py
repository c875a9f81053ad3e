"""What a rank carries over from step to step for every parameter, changed as a transaction.

A step begins with ``begin`` for every bucket, writes what the state will be into ``pending``, and
is committed or rolled back before the next one begins. Rolled back, everything is bit for bit as
before, because ``kept`` has not been touched: that takes twice the memory, and no time. Only where
several passes add up to one step of the optimizer, the state before the first is copied.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch

from gradweave._src.device_order import Order, keep_for_current
from gradweave._src.errors import RequestError
from gradweave._src.torch_internals import HOST


@dataclass(slots=True)
class Flat:
    """The state of one bucket's parameters, one behind the other."""

    names: tuple[str, ...]
    kept: torch.Tensor  # after the last committed step
    pending: torch.Tensor  # after this one, if it is committed
    finite: bool = True  # where False, ``pending`` must be forgotten


def places_of(elements: Mapping[str, int]) -> dict[str, slice]:
    """Return where parameters with so many elements lie, one behind the other."""
    ends = accumulate(elements.values())
    return {
        name: slice(end - count, end)
        for end, (name, count) in zip(ends, elements.items(), strict=True)
    }


def without(flat: Flat, places: Sequence[slice]) -> Flat:
    """Return the state as if nothing had been kept in these places; ``pending`` is shared."""
    if not places:
        return flat
    kept = flat.kept.clone()
    for place in places:
        kept[place] = 0
    return Flat(flat.names, kept, flat.pending)


def keep(flat: Flat, places: Sequence[slice]) -> None:
    """Keep residuals of these places as they are: this step changes nothing there."""
    for place in places:
        flat.pending[place] = flat.kept[place]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a parameter's elements lie in a flat bucket of torch's wrapper: as in the parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Self:
        like = torch.empty_like(parameter, device="meta")
        if like.stride() != parameter.stride():  # its memory has gaps, a bucket's has none
            like = torch.empty(parameter.shape, device="meta")
        return cls(tuple(parameter.shape), like.stride())

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view in the parameter's shape."""
        return flat.as_strided(self.shape, self.strides)


class Carried:
    """Residuals of all parameters (or velocities), zero at first.

    They are keyed by parameter: when buckets are built anew, they go with their parameters. They
    are kept in float32 for gradients of lower precision, and have the scale of the gradients.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._likes = {
            name: torch.empty(0, dtype=carried_type(parameter.dtype), device=parameter.device)
            for name, parameter in parameters.items()
        }
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._layouts = {name: _Layout.of(parameter) for name, parameter in parameters.items()}
        self._flats: dict[str, Flat] = {}  # by parameter
        self._open: list[Flat] = []
        # By parameter, before the first pass of a step that is made of several.
        self._before_waiting: dict[str, torch.Tensor] = {}
        self.scale = 1.0  # of the loss, and so of the gradients

    def begin(self, names: Sequence[str]) -> Flat:
        """Open a bucket of these parameters, in this order, for the present step."""
        unknown = [name for name in names if name not in self._sizes]
        if unknown:
            raise RequestError(f"no parameter {unknown[0]!r} in what is carried over")
        taken = {name for flat in self._open for name in flat.names}.intersection(names)
        if taken:
            raise RequestError(
                f"{min(taken)!r} has been begun; commit the step or roll it back first"
            )
        flat = self._flats.get(names[0]) if names else None
        if flat is None or flat.names != tuple(names):
            flat = self._lay_out(tuple(names))
        # Its memory may come from another stream than the one that sends: from a checkpoint's, say.
        for memory in (flat.kept, flat.pending):
            keep_for_current(memory, Order.RESIDUALS_KEPT)
        flat.finite = True
        self._open.append(flat)
        return flat

    @property
    def finite(self) -> bool:
        """Whether every bucket of the open step is finite."""
        return all(flat.finite for flat in self._open)

    def commit(self, *, discarded: Collection[str] = (), waiting: Collection[str] = ()) -> bool:
        """Make what is pending hold, in all buckets of the step; False where it was not finite.

        Then the step is rolled back: NaN or Inf never enters what is carried over. For parameters
        whose gradients have been ``discarded`` it is rolled back in any case. For those whose
        gradients are ``waiting`` for a step it holds, but may be discarded together with the next.
        """
        if not self.finite:
            self.rollback()
            return False
        before = self._before_waiting
        for flat in self._open:
            for name, place in self._places(flat).items():
                if name in waiting and name not in before:
                    before[name] = flat.kept[place].clone()
                elif name in discarded and name not in before:
                    flat.pending[place] = flat.kept[place]
            flat.kept, flat.pending = flat.pending, flat.kept
        self._open.clear()
        for name in before.keys() & discarded:
            self.value(name).copy_(before[name])
        self._before_waiting = {name: before[name] for name in before.keys() & waiting}
        return True

    def rollback(self) -> None:
        """Undo a step that was not taken: all is as before the first of its passes."""
        self._open.clear()
        for name, before in self._before_waiting.items():
            self.value(name).copy_(before)
        self._before_waiting.clear()

    def follow_scale(self, scale: float) -> None:
        """Scale what is carried as gradients will be: by ``scale``, which is AMP's loss scale.

        It is exact where both scales are powers of two.
        """
        self._require_settled()
        if not 0 < scale < float("inf"):
            raise RequestError(f"a loss scale must be positive and finite, got {scale}")
        if scale != self.scale:
            for flat in {id(flat): flat for flat in self._flats.values()}.values():
                flat.kept.mul_(scale / self.scale)
            for before in self._before_waiting.values():
                before.mul_(scale / self.scale)
            self.scale = scale

    def value(self, name: str, *, pending: bool = False) -> torch.Tensor:
        """Return a view of what is kept for one parameter, or zeros.

        With ``pending``, where its bucket is open, it is of what will be kept after this step.
        """
        if name not in self._flats:
            return self._likes[name].new_zeros(self._sizes[name])
        flat = self._flats[name]
        is_open = any(flat is one for one in self._open)
        source = flat.pending if pending and is_open else flat.kept
        return source[self._places(flat)[name]]

    def state_dict(self, *, discarded: Collection[str] | None = None) -> dict[str, Any]:
        """Return the scale, and tensors of the parameters' shapes, whatever their layout.

        It has all parameters, also before the first step, because a template is filled only where
        it has places. For ``discarded`` parameters an open step will be rolled back, for others it
        will be committed; here it stays open.
        """
        if discarded is None:
            self._require_settled()
        values = {
            name: self._layouts[name]
            .shaped(self._settled_value(name, is_discarded=name in (discarded or ())))
            .clone(memory_format=torch.contiguous_format)
            for name in self._sizes
        }
        return {"scale": self.scale, "values": values}

    def _settled_value(self, name: str, *, is_discarded: bool) -> torch.Tensor:
        if is_discarded and name in self._before_waiting:
            return self._before_waiting[name]
        return self.value(name, pending=not is_discarded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; parameters that it does not have start from zero."""
        self._require_settled()
        self.check(state)
        self.scale = float(state["scale"])
        self._flats.clear()
        self._before_waiting.clear()
        for name, value in state["values"].items():
            self._layouts[name].shaped(self._lay_out((name,)).kept).copy_(value)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise RequestError unless the state is one of these parameters."""
        for name, value in state["values"].items():
            own = self._layouts[name].shape if name in self._layouts else "no such parameter"
            if own != tuple(value.shape):
                raise RequestError(
                    f"the state has shape {tuple(value.shape)} for {name!r}, the model has {own}; "
                    "it is another model's"
                )

    def _lay_out(self, names: tuple[str, ...]) -> Flat:
        """Make a bucket of these parameters, filled with what has been kept for them."""
        likes = {(self._likes[name].dtype, self._likes[name].device) for name in names}
        if len(likes) > 1:
            raise RequestError(f"parameters of one bucket are of several kinds: {likes}")
        empty = torch.empty(0, device=HOST)
        kept = torch.cat([self.value(name) for name in names]) if names else empty
        flat = Flat(names, kept, torch.empty_like(kept))
        # The rest of a bucket that is taken apart is copied, so that its memory can be freed.
        left = {id(self._flats[name]): self._flats[name] for name in names if name in self._flats}
        alone = {
            name: self.value(name).clone()
            for old in left.values()
            for name in old.names
            if name not in names
        }
        for old in left.values():
            keep_for_current(old.kept, Order.OLD_RESIDUALS_KEPT)
        for name, value in alone.items():
            self._flats[name] = Flat((name,), value, torch.empty_like(value))
        self._flats.update(dict.fromkeys(names, flat))
        return flat

    def _places(self, flat: Flat) -> dict[str, slice]:
        return places_of({name: self._sizes[name] for name in flat.names})

    def _require_settled(self) -> None:
        if self._open:
            raise RequestError("a step is open; commit it or roll it back first")


def share_of(
    states: Sequence[Mapping[str, Any]], rank: int, ranks: int, *, mean: bool = False
) -> dict[str, Any]:
    """Return a rank's state of another number of ranks, whose sums over the ranks stay the same.

    Rank r takes over those of the old ranks r, r + ranks, r + 2 ranks, …; additional ranks start
    from zero. With ``mean``, for velocities, means over the ranks stay instead.
    """
    scales = {state["scale"] for state in states}
    if len(scales) != 1:
        raise RequestError(f"states of one step have one loss scale, got {sorted(scales)}")
    factor = ranks / len(states) if mean else 1.0
    values = _sums([state["values"] for state in states[rank::ranks]], factor)
    return {"scale": states[0]["scale"], "values": values}


def carried_type(gradient: torch.dtype) -> torch.dtype:
    """Return the type to carry gradients over in: float32, or float64 where gradients are."""
    return torch.float64 if gradient == torch.float64 else torch.float32


def _sums(states: Sequence[Mapping[str, torch.Tensor]], factor: float) -> dict[str, torch.Tensor]:
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state.items():
            sums[name] = sums[name] + value if name in sums else value
    return {name: value * factor for name, value in sums.items()}

"""What one iteration computes: which gradient is ready when, and how long forward takes."""

from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from math import prod, sqrt
from typing import get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src import notebook
from gradweave._src.checks import (
    LARGEST,
    first_twice,
    require_not_negative,
    require_one_of,
    require_positive,
    require_text,
)
from gradweave._src.costs.cost import FloatArray
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import Origin, count_text, size_text, time_text

LARGEST_SCALE = 1e6
MATRIX, MOST_DIMENSIONS = 2, 64  # torch's tensors have no more


class Tensor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gradient: its size, when backward has produced it, and its share of the forward pass.

    Where several tensors belong to one layer, the layer's forward time stands at the last of them
    in forward order: all of them are needed before that time begins.

    Attributes:
        name: as the model calls the parameter.
        elements: how many there are.
        bytes_per_element: 4 for float32.
        ready_s: when backward has produced it, in seconds since backward began.
        forward_s: its share of forward, in seconds.
        shape: its dimensions; None where only the number of elements is known.

    Raises:
        RequestError: if a number is out of range, the name is empty, or the shape has another
            number of elements.

    Examples:
        >>> tensor = gradweave.Tensor(
        ...     name="fc.bias", elements=10, bytes_per_element=4, ready_s=0.1, forward_s=0.0
        ... )
        >>> tensor.nbytes
        40
    """

    name: str
    elements: int
    bytes_per_element: int
    ready_s: float
    forward_s: float
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_text(self, "name")
        require_positive(self, "elements", "bytes_per_element")
        require_not_negative(self, "ready_s", "forward_s")
        if self.shape is not None and len(self.shape) > MOST_DIMENSIONS:
            raise RequestError(
                f"{self.name!r}: shape must have at most {MOST_DIMENSIONS} dimensions, got "
                f"{len(self.shape)}"
            )
        if self.shape is not None and prod(self.shape) != self.elements:
            raise RequestError(
                f"{self.name!r}: shape {list(self.shape)} has {prod(self.shape)} elements, not "
                f"{self.elements}"
            )

    @property
    def nbytes(self) -> int:
        """How many bytes the gradient has."""
        return self.elements * self.bytes_per_element

    def scaled(self, scale: float) -> "Tensor":
        """Return it with about ``scale`` times as many elements, in the same proportions.

        Dimensions behind the first are merged, so the result has two.
        """
        if self.shape is None or len(self.shape) < MATRIX or scale == 1:
            elements = max(1, round(self.elements * scale))
            shape = None if self.shape is None else self.shape if scale == 1 else (elements,)
            return replace(self, elements=elements, shape=shape)
        rows, columns = self.shape[0], prod(self.shape[1:])
        fewer_rows = max(1, round(rows * sqrt(scale)))
        shape = (fewer_rows, max(1, round(rows * columns * scale / fewer_rows)))
        return replace(self, elements=prod(shape), shape=shape)


class Trace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One iteration on one worker; the tensors stand in the order in which backward yields them.

    The forward pass uses them in the reverse order. Backward ends with the last tensor.
    ``record_trace`` and `gradweave record` record one, ``load_trace`` finds a shipped one.

    Attributes:
        name: what it is called.
        origin: "measured" or "estimated".
        source: where the times come from, in words.
        batch_size: how many samples a worker has in an iteration.
        tensors: the gradients, in the order in which backward yields them.

    Raises:
        RequestError: if a number is out of range, the name is empty, a tensor's name stands twice,
            or a tensor is ready before the one before it.

    Examples:
        >>> trace = gradweave.load_trace("resnet50")
        >>> len(trace.tensors), int(trace.nbytes.sum())
        (161, 102228128)
    """

    name: str
    origin: Origin
    source: str
    batch_size: int
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        require_text(self, "name")
        require_one_of(self, origin=get_args(Origin))
        require_positive(self, "batch_size")
        if not self.tensors:
            raise RequestError("tensors must not be empty")
        if (twice := first_twice(tensor.name for tensor in self.tensors)) is not None:
            raise RequestError(f"tensors: {twice!r} stands twice; names must be unique")
        for before, after in pairwise(self.tensors):
            if after.ready_s < before.ready_s:
                raise RequestError(
                    f"tensors: ready_s of {after.name!r} is {after.ready_s}, earlier than "
                    f"{before.ready_s} of {before.name!r} before it; list them in backward order"
                )
        if self.compute_s == 0:
            raise RequestError("tensors: ready_s and forward_s are all zero; nothing is computed")

    @property
    def ready_s(self) -> FloatArray:
        """When each tensor is ready, since backward began."""
        return np.array([tensor.ready_s for tensor in self.tensors])

    @property
    def nbytes(self) -> FloatArray:
        """The bytes of each gradient, in the same order."""
        return np.array([tensor.nbytes for tensor in self.tensors], dtype=np.float64)

    @property
    def forward_s(self) -> float:
        """How long forward takes."""
        return sum(tensor.forward_s for tensor in self.tensors)

    @property
    def backward_s(self) -> float:
        """How long backward takes, which ends with the last tensor."""
        return self.tensors[-1].ready_s

    @property
    def compute_s(self) -> float:
        """How long both passes take."""
        return self.forward_s + self.backward_s

    @property
    def summary(self) -> str:
        """What the trace is of, in a few words."""
        return (
            f"{count_text(len(self.tensors), 'gradient')}, {size_text(self.nbytes.sum())}, forward "
            f"{time_text(self.forward_s)}, backward {time_text(self.backward_s)}"
        )

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each gradient, in backward order, for a data frame."""
        return [
            {
                "tensor": tensor.name,
                "elements": tensor.elements,
                "nbytes": tensor.nbytes,
                "ready_s": tensor.ready_s,
                "forward_s": tensor.forward_s,
            }
            for tensor in self.tensors
        ]

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, {self.summary})"

    def _repr_html_(self) -> str:
        return notebook.table(repr(self), self.rows())

    def with_bytes_per_element(self, bytes_per_element: int) -> "Trace":
        """Return the same iteration with gradients of another width, 2 for mixed precision."""
        return self._map(lambda tensor: replace(tensor, bytes_per_element=bytes_per_element))

    def rescaled(
        self,
        *,
        forward_s: float | None = None,
        backward_s: float | None = None,
        parameter_scale: float = 1.0,
    ) -> "Trace":
        """Return the same tensors with other total times, and other numbers of elements."""
        forward = _ratio(forward_s, self.forward_s, "forward")
        backward = _ratio(backward_s, self.backward_s, "backward")
        if not 0 < parameter_scale <= LARGEST_SCALE:
            raise RequestError(
                f"parameter scale must be above 0 and at most {LARGEST_SCALE:g}, "
                f"got {parameter_scale}"
            )
        return self._map(
            lambda tensor: replace(
                tensor.scaled(parameter_scale),
                ready_s=tensor.ready_s * backward,
                forward_s=tensor.forward_s * forward,
            )
        )

    def in_order(self, names: Iterable[str]) -> "Trace":
        """Return the trace of a worker that sends its gradients in this order.

        A gradient that is ready before its turn waits for those before it, so its ``ready_s`` is
        theirs. Names that are not in the trace are skipped: parameters without elements have no
        gradient in it.

        Raises:
            RequestError: if none of the names is in the trace, or one of them stands twice.
        """
        by_name = {tensor.name: tensor for tensor in self.tensors}
        tensors, latest_s = [], 0.0
        for name in names:
            if name in by_name:
                latest_s = max(latest_s, by_name[name].ready_s)
                tensors.append(replace(by_name[name], ready_s=latest_s))
        return replace(self, tensors=tuple(tensors))

    def joined(self, key: Callable[[str], str]) -> "Trace":
        """Return the trace with neighbours joined to one tensor where ``key`` is the same of both.

        ``key`` is given a tensor's name, and what it returns is the name of the joined tensor,
        which is ready when the last of them is.

        Raises:
            RequestError: if they have elements of different widths, or tensors that are not
                neighbours have the same key.
        """
        groups = (tuple(group) for _, group in groupby(self.tensors, lambda t: key(t.name)))
        return replace(self, tensors=tuple(_join(group, key) for group in groups))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Trace":
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))


def _ratio(wanted_s: float | None, present_s: float, what: str) -> float:
    if wanted_s is None:
        return 1.0
    if not 0 < wanted_s <= LARGEST:
        raise RequestError(f"{what} time must be a positive number of seconds, got {wanted_s}")
    if present_s == 0 or wanted_s / present_s > LARGEST:
        raise RequestError(f"{what} cannot be rescaled from {present_s} s to {wanted_s} s")
    return wanted_s / present_s


def _join(group: tuple[Tensor, ...], key: Callable[[str], str]) -> Tensor:
    widths = {tensor.bytes_per_element for tensor in group}
    if len(widths) > 1:
        raise RequestError(f"{key(group[0].name)!r} joins tensors of {sorted(widths)} bytes each")
    return Tensor(
        name=key(group[0].name),
        elements=sum(tensor.elements for tensor in group),
        bytes_per_element=widths.pop(),
        ready_s=group[-1].ready_s,
        forward_s=sum(tensor.forward_s for tensor in group),
    )

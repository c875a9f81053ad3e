"""The parameters of a bucket in one piece of memory, and their gradients in another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import nn

from gradweave._src.collectives.schedule import block_edges
from gradweave._src.errors import RequestError
from gradweave._src.plan import Bucket, Plan
from gradweave._src.planning.bsp import owner
from gradweave._src.vocabulary import Passes


@dataclass(frozen=True, slots=True)
class Piece:
    """Which elements of a bucket are a parameter's, in the order in which its memory has them.

    So a view of the piece has the parameter's own memory format, such as channels_last.
    """

    first: int
    last: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece of something as large as the bucket, in the parameter's shape."""
        return flat[self.first : self.last].as_strided(self.shape, self.strides)

    def flattened(self, parameter_like: torch.Tensor) -> torch.Tensor:
        """Return a copy of something in the parameter's shape, in the order of the piece."""
        flat = parameter_like.new_empty(self.last - self.first)
        flat.as_strided(self.shape, self.strides).copy_(parameter_like)
        return flat


class FlatBucket:
    """Parameters become views of ``values``; gradients are taken over into ``gradients``.

    At first it has no memory: ``take_parameters`` and ``make_room_for_gradients`` give it some, so
    that whoever has other buckets can free theirs in between. Who copies or moves a parameter
    afterwards (``.to(…)``, ``.data = …``) takes it out of here.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        collective: str,
        passes: Passes = "both",
    ) -> None:
        self.names, self.collective, self.passes = tuple(parameters), collective, passes
        self.parameters = list(parameters.values())
        kinds = {(parameter.dtype, parameter.device) for parameter in self.parameters}
        if len(kinds) > 1:
            raise RequestError(f"parameters of one bucket must be of one kind, got {kinds}")
        edges = list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.pieces = [
            Piece(first, last, parameter.shape, dense_strides(parameter))
            for parameter, (first, last) in zip(self.parameters, pairwise(edges), strict=True)
        ]
        self.numel = edges[-1]
        self.values = self.gradients = self.parameters[0].detach().new_empty(0)
        self._gradient_of: dict[nn.Parameter, torch.Tensor] = {}
        self._taken: set[nn.Parameter] = set()

    def take_parameters(self) -> None:
        """Make parameters views of ``values``; old memory is free when all its views have left."""
        self.values = self.values.new_empty(self.numel)
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            piece.view(self.values).copy_(parameter.detach())
            parameter.data = piece.view(self.values)

    def make_room_for_gradients(self) -> None:
        self.gradients = torch.zeros_like(self.values)
        self._gradient_of = {
            parameter: piece.view(self.gradients)
            for parameter, piece in zip(self.parameters, self.pieces, strict=True)
        }

    def drop_gradients(self) -> None:
        """Give their memory back: nothing is taken over any more."""
        self.gradients = self.gradients.new_empty(0)
        self._gradient_of = {}

    @torch.no_grad()
    def take_gradient(self, parameter: nn.Parameter, *, divided_by: int) -> None:
        """Add the gradient to what was taken since the last ``complete`` or ``forget``; free it."""
        gradient = parameter.grad
        assert gradient is not None
        place = self._gradient_of[parameter]
        if parameter in self._taken:
            place.add_(gradient, alpha=1 / divided_by)
        else:
            torch.div(gradient, divided_by, out=place)
            self._taken.add(parameter)
        parameter.grad = None

    def complete(self) -> None:
        """Give zeros to parameters without a gradient, and let the next gradients begin anew."""
        for parameter in self.parameters:
            if parameter not in self._taken:
                self._gradient_of[parameter].zero_()
        self.forget(self.parameters)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the next gradients of these replace what is there instead of being added to it."""
        self._taken.difference_update(parameters)

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Give parameters their gradients for the length of a block, for an optimizer."""
        for parameter, gradient in self._gradient_of.items():
            parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def owned_by(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return for each parameter which elements of the bucket are its own and the rank's.

        Where nothing is to travel beside forward, everybody has everything.
        """
        spans = [(piece.first, piece.last) for piece in self.pieces]
        if self.passes == "backward":
            return spans
        edges = block_edges(self.numel, ranks)
        begin, end = int(edges[rank]), int(edges[rank + 1])
        return [(min(max(first, begin), last), max(min(last, end), first)) for first, last in spans]


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides, or those of a copy where its memory has gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def flat_buckets(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> list[FlatBucket]:
    """Return a plan's buckets, which have taken the parameters over."""
    buckets = buckets_without_memory(plan, parameters)
    for bucket in buckets:
        bucket.take_parameters()
        bucket.make_room_for_gradients()
    return buckets


def buckets_without_memory(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> list[FlatBucket]:
    """Return a plan's buckets; one with parameters of several kinds becomes several, in a row."""

    def kind(name: str) -> tuple[str, str]:
        return str(parameters[name].dtype), str(parameters[name].device)

    return [
        FlatBucket(
            {name: parameters[name] for name in names},
            collective=bucket.collective,
            passes=plan.passes,
        )
        for bucket in plan.buckets
        for _, names in groupby(bucket.tensors, kind)
    ]


def buckets_up_to(
    parameters: Mapping[str, nn.Parameter], most_bytes: int, *, planner: str, collective: str
) -> Plan:
    """Plan from the last declared to the first, closing each bucket at that many bytes."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in reversed(list(parameters)):
        if groups[-1] and held >= most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += parameters[name].nbytes
    return _plan(planner, groups, collective)


def buckets_by_module(parameters: Mapping[str, nn.Parameter], *, collective: str) -> Plan:
    """Plan a bucket for each module with parameters of its own, the last declared first."""
    owners = groupby(reversed(list(parameters)), owner)
    groups = [list(names) for _, names in owners]
    return _plan("by module", groups, collective)


def _plan(planner: str, groups: Sequence[Sequence[str]], collective: str) -> Plan:
    buckets = (Bucket(tensors=tuple(names), collective=collective) for names in groups)
    return Plan(planner=planner, buckets=tuple(buckets), passes="both")

"""The parameters of a bucket in one piece of memory, and their gradients in another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise

import torch
from torch import nn

from gradweave.collectives.schedule import block_edges
from gradweave.errors import RequestError
from gradweave.plan import Bucket, Plan
from gradweave.planning.bsp import owner
from gradweave.words import Passes


class FlatBucket:
    """Parameters become views of ``values``; gradients are taken over into ``gradients``.

    Who copies or moves a parameter afterwards (``.to(…)``, ``.data = …``) takes it out of here.
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
        sizes = [parameter.numel() for parameter in self.parameters]
        edges = list(accumulate(sizes, initial=0))
        self.spans = list(pairwise(edges))
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.gradients = torch.zeros_like(self.values)
        self._gradient_of = {
            parameter: self.gradients[first:last].view(parameter.shape)
            for parameter, (first, last) in zip(self.parameters, self.spans, strict=True)
        }
        self._taken: set[nn.Parameter] = set()
        for parameter, (first, last) in zip(self.parameters, self.spans, strict=True):
            parameter.data = self.values[first:last].view(parameter.shape)

    @torch.no_grad()
    def take_gradient(self, parameter: nn.Parameter, *, divided_by: int) -> None:
        """Add it to what has been taken since the last ``begin``, and free it."""
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
        """Parameters without a gradient have zeros for one."""
        for parameter in self.parameters:
            if parameter not in self._taken:
                self._gradient_of[parameter].zero_()
        self.forget()

    def forget(self) -> None:
        """The next gradients are the first ones."""
        self._taken.clear()

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Parameters have theirs meanwhile, for an optimizer."""
        for parameter, gradient in self._gradient_of.items():
            parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def owned_by(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """For each parameter, which elements of the bucket are both its own and the rank's.

        Where nothing is to travel beside forward, everybody has everything.
        """
        if self.passes == "backward":
            return self.spans
        edges = block_edges(self.values.numel(), ranks)
        begin, end = int(edges[rank]), int(edges[rank + 1])
        return [
            (min(max(first, begin), last), max(min(last, end), first)) for first, last in self.spans
        ]


def flat_buckets(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> list[FlatBucket]:
    """A plan's buckets; one with parameters of several kinds becomes several, in a row."""

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
    """From the last declared to the first, until a bucket has that many bytes."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in reversed(list(parameters)):
        if groups[-1] and held >= most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += parameters[name].nbytes
    return _plan(planner, groups, collective)


def merged(plan: Plan) -> Plan:
    """Everything in one bucket."""
    names = tuple(name for bucket in plan.buckets for name in bucket.tensors)
    bucket = Bucket(tensors=names, collective=plan.buckets[0].collective)
    return Plan(planner="single", buckets=(bucket,), passes=plan.passes)


def buckets_by_module(parameters: Mapping[str, nn.Parameter], *, collective: str) -> Plan:
    """One for each module that has parameters of its own, from the last declared to the first."""
    owners = groupby(reversed(list(parameters)), owner)
    groups = [list(names) for _, names in owners]
    return _plan("by module", groups, collective)


def _plan(planner: str, groups: Sequence[Sequence[str]], collective: str) -> Plan:
    buckets = (Bucket(tensors=tuple(names), collective=collective) for names in groups)
    return Plan(planner=planner, buckets=tuple(buckets), passes="both")

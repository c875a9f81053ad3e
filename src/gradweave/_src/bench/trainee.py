"""What ranks of a training benchmark train, and what a runtime makes of it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.lanes import LANES
from gradweave._src.comm.small_messages import largest
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.spans import SpanRecorder, aligned_timelines
from gradweave._src.timeline import Timeline
from gradweave._src.workloads.replay import Replay

BATCH = torch.zeros(1)
CPU = torch.device("cpu")


class Trainee:
    """A model whose gradients on rank r are P (r + 1), so that their mean is exact."""

    def __init__(self, model: Replay, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.clock_offset_s = clock_offset_s(group)
        # All wrappers use these groups, one after the other, for making one takes a while.
        self.own_groups = [same_ranks(group) for _ in range(LANES)]
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.bytes_of = {name: parameter.nbytes for parameter, name in self.names.items()}

    def iterate(
        self, forward: Callable[[torch.Tensor], torch.Tensor], recorder: SpanRecorder | None
    ) -> None:
        self.model.zero_grad()
        if recorder is not None:
            recorder.begin()
        loss = forward(BATCH)
        if recorder is not None:
            recorder.backward()
        loss.backward()  # type: ignore[no-untyped-call]
        if recorder is not None and forward is self.model:
            recorder.ready()

    def recorder(self) -> SpanRecorder:
        return SpanRecorder(self.names)

    def timelines(self, recorder: SpanRecorder) -> list[Timeline]:
        """Return what all ranks' recorders have seen. Call it on every rank."""
        return aligned_timelines(recorder, self.group, self.clock_offset_s)

    @property
    def mean(self) -> float:
        return self.group.size() * (self.group.size() + 1) / 2

    def gradients_are(self, expected: float, *, within: float = 0.0) -> bool:
        """Return whether all ranks have ``expected`` gradients, up to the share ``within``."""
        parameters = self.model.parameters()
        return self.on_all(*(is_filled(p.grad, expected, within=within) for p in parameters))

    def gradients_are_alike(self) -> bool:
        """Return whether gradients are alike on all ranks, and not zero."""
        return self.is_alike(
            sum(
                float(parameter.grad.double().sum())
                for parameter in self.model.parameters()
                if parameter.grad is not None
            )
        )

    def on_all(self, *holds: bool) -> bool:
        wrong = not all(holds)
        return largest(self.group, [float(wrong)]) == [0.0]

    def is_alike(self, total: float) -> bool:
        most, negated_least = largest(self.group, [total, -total])
        return most == -negated_least != 0.0


class Running(NamedTuple):
    """One iteration of a case, to be called again and again, and how the last one went.

    All ranks must ask for ``timelines``, which are those of all of them or none, and for
    ``is_correct``.
    """

    step: Callable[[], None]
    timelines: Callable[[], list[Timeline]]
    is_correct: Callable[[], bool]


class Seen(torch.optim.Optimizer):
    """An optimizer that changes nothing, unless ``expected`` is set.

    Then it checks gradients, and writes that value.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.expected: float | None = None
        self.is_correct = False

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        del closure
        if self.expected is None:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.is_correct = all(is_filled(p.grad, self.expected) for p in parameters)
        for parameter in parameters:
            parameter.fill_(self.expected)


def is_filled(tensor: torch.Tensor | None, value: float, *, within: float = 0.0) -> bool:
    return tensor is not None and bool(torch.all((tensor - value).abs() <= within * abs(value)))

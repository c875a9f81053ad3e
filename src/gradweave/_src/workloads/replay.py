"""The emulated accelerator: a module that takes the time a Trace says, and nothing else.

Its parameters, its autograd graph and its gradients are real, so everything around it, such as
DistributedDataParallel, works as it does around a real model. Only the kernels are replaced, by
waiting until the moment at which they would have been done. Moments are counted from the beginning
of a pass, as on an accelerator whose queue is never empty: a host that is late catches up. Only
where it waits for something before it calls a layer, such as parameters that are on their way, that
layer's kernels begin when it is called, and all that follows is later by as much.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import nn

from gradweave._src.errors import RequestError
from gradweave._src.trace import Tensor, Trace
from gradweave._src.vocabulary import ReplayMode

DTYPES = {2: torch.float16, 4: torch.float32, 8: torch.float64}

# What a script does between two kernels, more or less: one small operation after the other.
DISPATCHED_ELEMENTS = 64

# What is shorter is no waiting before a layer, but what hooks and the host's scheduler take.
LEAST_WAIT_S = 2e-4


class Timer(Protocol):
    """What a ``Replay`` reads the clock by and lets time pass with, such as one for tests."""

    def now_s(self) -> float:
        """Return the present moment in seconds, counted from any other."""
        ...

    def wait_until(self, moment_s: float) -> None:
        """Return when that moment has come."""
        ...


class Waiting:
    """A timer that sleeps, as if the host had nothing to do: processor and lock are free."""

    def now_s(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        remaining_s = moment_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)


class Dispatching:
    """A timer that keeps issuing small operations, as the main thread of a training does."""

    def __init__(self) -> None:
        self._operand = torch.zeros(DISPATCHED_ELEMENTS)

    def now_s(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        while time.perf_counter() < moment_s:
            self._operand.add_(1.0)


TIMERS: dict[ReplayMode, Callable[[], Timer]] = {"waiting": Waiting, "dispatching": Dispatching}


class Replay(nn.Module):
    """A model that takes the time a trace says, with real parameters, graph and gradients.

    Call it with any tensor, and backward through the single number it returns. Each parameter has
    the name, shape and width of its tensor in the trace, and every element of each gradient is
    ``gradient``.

    Args:
        trace: what is replayed.
        mode: "waiting" for an accelerator that leaves its host idle, "dispatching" for a busy host.
        gradient: what every element of each gradient is.
        timer: what reads the clock and lets time pass (default: that of ``mode``).

    Raises:
        RequestError: if a name of the trace cannot be that of a parameter, or a width is not
            torch's.

    Examples:
        >>> trace = gradweave.load_trace("resnet20").rescaled(forward_s=0.001, backward_s=0.002)
        >>> gradweave.workloads.Replay(trace)(torch.zeros(1)).backward()
    """

    def __init__(
        self,
        trace: Trace,
        *,
        mode: ReplayMode = "waiting",
        gradient: float = 1.0,
        timer: Timer | None = None,
    ) -> None:
        super().__init__()
        self._trace, self._gradient, self._timer = trace, gradient, timer or TIMERS[mode]()
        self._passes = _Passes(self._timer, gradient)
        in_forward_order = list(reversed(trace.tensors))
        ends_s = accumulate((tensor.forward_s for tensor in in_forward_order), initial=0.0)
        self._layers: list[tuple[nn.Module, str, _Moments]] = []
        for tensor, (forward_s, forward_end_s) in zip(
            in_forward_order, pairwise(ends_s), strict=True
        ):
            parameter = _parameter(tensor)
            path, _, leaf = tensor.name.rpartition(".")
            owner = self._owner(path)
            try:
                owner.register_parameter(leaf, parameter)
            except KeyError as error:
                raise RequestError(
                    f"{tensor.name!r} cannot be the name of a parameter: {error}"
                ) from None
            moments = _Moments(forward_s, forward_end_s, tensor.ready_s)
            self._layers.append((owner, leaf, moments))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Let the time of a forward pass go by, and return a number to go backward from."""
        del batch
        self._passes.begin_forward()
        activation = torch.zeros(1, requires_grad=torch.is_grad_enabled())
        for owner, leaf, moments in self._layers:
            if owner is self:
                activation = _apply(activation, getattr(self, leaf), moments, self._passes)
            else:
                self._passes.call()
                activation = owner(activation, leaf, moments, self._passes)
        return activation.sum()

    def in_groups(self, lengths: Sequence[int]) -> "GroupedReplay":
        """Return the same work on parameters of its own, so many of them in each group."""
        ends = list(accumulate(lengths))
        groups = [
            _Group(
                self._trace.tensors[begin:end],
                begin_s=self._trace.tensors[begin - 1].ready_s if begin else 0.0,
                passes=_Passes(self._timer, self._gradient),
            )
            for begin, end in pairwise([0, *ends])
        ]
        return GroupedReplay(groups)

    def _owner(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for name in filter(None, path.split(".")):
            if name not in dict(owner.named_children()):  # an attribute of that name is no module
                owner.add_module(name, _Layer())
            owner = owner.get_submodule(name)
        return owner


class GroupedReplay(nn.Module):
    """A replay whose parameters belong to groups, each called once; ``Replay.in_groups`` makes it.

    Groups are given in backward order. A group's kernels begin when the group is called, and not
    before: whatever lets the host wait for parameters between two groups delays all that follows.
    """

    def __init__(self, groups: Sequence[nn.Module]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(reversed(groups))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Let the time of a forward pass go by, and return a number to go backward from."""
        del batch
        activation = torch.zeros(1, requires_grad=torch.is_grad_enabled())
        for group in self.groups:
            activation = group(activation)
        return activation.sum()


class _Group(nn.Module):
    """A group of tensors whose backward begins at ``begin_s`` of the trace."""

    def __init__(self, tensors: Sequence[Tensor], *, begin_s: float, passes: "_Passes") -> None:
        super().__init__()
        in_forward_order = list(reversed(tensors))
        ends_s = accumulate((tensor.forward_s for tensor in in_forward_order), initial=0.0)
        self._passes = passes
        self._moments = [
            _Moments(forward_s, end_s, tensor.ready_s - begin_s)
            for tensor, (forward_s, end_s) in zip(in_forward_order, pairwise(ends_s), strict=True)
        ]
        for number, tensor in enumerate(in_forward_order):
            self.register_parameter(str(number), _parameter(tensor))

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self._passes.begin_forward()
        for number, moments in enumerate(self._moments):
            activation = _apply(activation, getattr(self, str(number)), moments, self._passes)
        return activation


class _Layer(nn.Module):
    """Owns parameters; called once for each of them."""

    def forward(
        self, activation: torch.Tensor, leaf: str, moments: "_Moments", passes: "_Passes"
    ) -> torch.Tensor:
        passes.begin_forward_of(moments)
        return _apply(activation, getattr(self, leaf), moments, passes)


class _Moments:
    """When a layer begins and is done, in seconds since its pass began."""

    def __init__(self, forward_s: float, forward_end_s: float, ready_s: float) -> None:
        self.forward_s, self.forward_end_s, self.ready_s = forward_s, forward_end_s, ready_s


class _Passes:
    """The passes that are under way: when they began."""

    def __init__(self, timer: Timer, gradient: float) -> None:
        self._timer, self._gradient = timer, gradient
        self._forward_s = self._called_s = 0.0
        self._backward_s: float | None = None

    def call(self) -> None:
        """Note that a layer is called, before hooks that may let it wait."""
        self._called_s = self._timer.now_s()

    def begin_forward_of(self, moments: _Moments) -> None:
        """Delay this layer, and all that follow, by what it has waited for."""
        now_s = self._timer.now_s()
        waited_s, late_s = now_s - self._called_s, now_s - self._forward_s - moments.forward_s
        if waited_s > LEAST_WAIT_S and late_s > 0:
            self._forward_s += min(waited_s, late_s)

    def begin_forward(self) -> None:
        self._forward_s = self._timer.now_s()
        self._backward_s = None

    def finish_forward_of(self, moments: _Moments) -> None:
        self._timer.wait_until(self._forward_s + moments.forward_end_s)

    def finish_backward_of(self, moments: _Moments) -> None:
        if self._backward_s is None:
            self._backward_s = self._timer.now_s()
        self._timer.wait_until(self._backward_s + moments.ready_s)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient without memory of its own; autograd writes it out once."""
        return torch.full((1,), self._gradient, dtype=parameter.dtype).expand_as(parameter)


def _parameter(tensor: Tensor) -> nn.Parameter:
    if tensor.bytes_per_element not in DTYPES:
        raise RequestError(
            f"{tensor.name!r} has {tensor.bytes_per_element} bytes per element; "
            f"a replay knows {', '.join(map(str, DTYPES))}"
        )
    shape = (tensor.elements,) if tensor.shape is None else tensor.shape
    return nn.Parameter(torch.zeros(shape, dtype=DTYPES[tensor.bytes_per_element]))


def _apply(
    activation: torch.Tensor, parameter: torch.Tensor, moments: _Moments, passes: _Passes
) -> torch.Tensor:
    result = _Kernel.apply(activation, parameter, moments, passes)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        activation: torch.Tensor,
        parameter: torch.Tensor,
        moments: _Moments,
        passes: _Passes,
    ) -> torch.Tensor:
        ctx.parameter, ctx.moments, ctx.passes = parameter, moments, passes
        passes.finish_forward_of(moments)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        ctx.passes.finish_backward_of(ctx.moments)
        return gradient, ctx.passes.gradient_of(ctx.parameter), None, None

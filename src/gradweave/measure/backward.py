"""Recording a Trace from real iterations: when gradients are ready, how long forward takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn

from gradweave.comm.agree import group_device, largest
from gradweave.errors import RequestError
from gradweave.measure.clocks import Clock, clock_for
from gradweave.trace import Tensor, Trace


class Recording(Struct, frozen=True, kw_only=True):
    """A trace, and what was not the same in every iteration."""

    trace: Trace
    iterations: int
    reordered: int  # iterations in which gradients came in another order than in the first
    without_gradient: dict[str, int]  # in how many iterations, for parameters that lacked theirs


def record_trace(
    model: nn.Module,
    step: Callable[[], object],
    *,
    name: str,
    batch_size: int,
    warmup: int = 3,
    iterations: int = 10,
    group: dist.ProcessGroup | None = None,
    clock: Clock | None = None,
) -> Recording:
    """Run ``step``, which calls the model and backward, and note when what happens.

    Medians over the iterations after the warm-up; with a ``group``, the slowest rank's. A gradient
    is ready when backward has accumulated it for the last time. A tensor's share of forward begins
    when the module that owns it is called, and ends when the next tensor's begins. What follows the
    model's forward, such as the loss, counts as the beginning of backward.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise RequestError("the model has no parameters that require a gradient")
    observed = []
    with observing(model, parameters, clock) as observer:
        for number in range(warmup + iterations):
            observer.begin()
            step()
            if number >= warmup:
                observed.append(observer.iteration())
    return recording_of(observed, parameters, name=name, batch_size=batch_size, group=group)


class Iteration(Struct, frozen=True, kw_only=True):
    """One iteration in seconds: since forward began, and since it ended."""

    forward_s: float
    needed_s: dict[str, float]
    ready_s: dict[str, float]  # in the order in which they came


class Observer:
    """Marks of one iteration, set by hooks; ``begin`` forgets what went before."""

    def __init__(self, clock: Clock, parameters: dict[str, nn.Parameter]) -> None:
        self._clock, self._parameters = clock, parameters
        self.begin()

    def begin(self) -> None:
        self._began: object | None = None
        self._ended: object | None = None
        self._called: dict[str, object] = {}
        self._ready: dict[str, object] = {}
        self._is_over = False

    def end(self) -> None:
        """What follows belongs to something else, until the next ``begin``."""
        self._is_over = True

    def before_module(self, name: str) -> None:
        if self._is_over:
            return
        mark = self._clock.mark()
        self._called.setdefault(name, mark)
        if self._began is None:
            self._began = mark

    def after_model(self) -> None:
        if not self._is_over:
            self._ended = self._clock.mark()

    def gradient(self, name: str) -> None:
        if self._is_over:
            return
        self._ready.pop(name, None)  # the last accumulation counts, and so does its place
        self._ready[name] = self._clock.mark()

    @property
    def has_gradients(self) -> bool:
        return bool(self._ready)

    def iteration(self) -> Iteration:
        if self._began is None or self._ended is None:
            raise RequestError("step() did not call the model; it must run forward and backward")
        began, ended = self._began, self._ended
        return Iteration(
            forward_s=self._clock.seconds(began, ended),
            needed_s={
                name: self._clock.seconds(began, self._called[_called_owner(name, self._called)])
                for name in self._parameters
            },
            ready_s={
                name: max(0.0, self._clock.seconds(ended, mark))
                for name, mark in self._ready.items()
            },
        )


def _called_owner(parameter: str, called: dict[str, object]) -> str:
    """The innermost module around a parameter that was called; some use others' parameters."""
    owner = parameter
    while owner:
        owner = owner.rpartition(".")[0]
        if owner in called:
            break
    return owner


@contextmanager
def observing(
    model: nn.Module, parameters: dict[str, nn.Parameter], clock: Clock | None = None
) -> Iterator[Observer]:
    """Hooks on every module and parameter, for the length of a block."""
    observer = Observer(clock or clock_for(_device(parameters)), parameters)
    handles = [model.register_forward_hook(_Mark(observer.after_model))]
    for name, module in model.named_modules():
        mark = _Mark(partial(observer.before_module, name))
        handles.append(module.register_forward_pre_hook(mark))
    for name, parameter in parameters.items():
        register = parameter.register_post_accumulate_grad_hook
        handles.append(register(lambda _, name=name: observer.gradient(name)))  # type: ignore[no-untyped-call]
    try:
        yield observer
    finally:
        for handle in handles:
            handle.remove()


class _Mark:
    """A hook that leaves no trace where the model is pickled meanwhile."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark

    def __call__(self, *_: object) -> None:
        self._mark()

    def __reduce__(self) -> tuple[type["_Mark"], tuple[Callable[[], object]]]:
        return _Mark, (dict,)  # which does nothing


def recording_of(
    observed: list[Iteration],
    parameters: dict[str, nn.Parameter],
    *,
    name: str,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
) -> Recording:
    """Medians over the iterations; with a ``group``, of the slowest rank."""
    ready_s = _median_ready_s(observed, parameters)
    needed_s = {name: median(one.needed_s[name] for one in observed) for name in parameters}
    forward_s = median(one.forward_s for one in observed)
    if group is not None:
        *worst, forward_s = largest(
            group,
            [*ready_s.values(), *needed_s.values(), forward_s],
            device=group_device(group),
        )
        ready_s = dict(zip(parameters, worst[: len(parameters)], strict=True))
        needed_s = dict(zip(parameters, worst[len(parameters) :], strict=True))
    shares_s = _forward_shares_s(needed_s, forward_s)
    orders = [tuple(one.ready_s) for one in observed]
    # Of gradients that come at once, the one declared last comes first, as it does in backward.
    declared = {name: place for place, name in enumerate(parameters)}
    backward_order = sorted(parameters, key=lambda name: (ready_s[name], -declared[name]))
    return Recording(
        trace=Trace(
            name=name,
            batch_size=batch_size,
            origin="measured",
            source=f"recorded on {_device(parameters).type}, torch {torch.__version__}, "
            f"median of {len(observed)} iterations",
            tensors=tuple(
                Tensor(
                    name=name,
                    elements=parameters[name].numel(),
                    bytes_per_element=parameters[name].element_size(),
                    ready_s=ready_s[name],
                    forward_s=shares_s[name],
                )
                for name in backward_order
            ),
        ),
        iterations=len(observed),
        reordered=sum(order != orders[0] for order in orders),
        without_gradient={
            name: missing
            for name in parameters
            if (missing := sum(name not in one.ready_s for one in observed))
        },
    )


def _median_ready_s(
    observed: list[Iteration], parameters: dict[str, nn.Parameter]
) -> dict[str, float]:
    """Over the iterations that had the gradient; one that never came is as late as the last."""
    times_s = {
        name: [one.ready_s[name] for one in observed if name in one.ready_s] for name in parameters
    }
    if not any(times_s.values()):
        raise RequestError("no parameter got a gradient; step() must call backward")
    medians_s = {name: median(times) for name, times in times_s.items() if times}
    return {name: medians_s.get(name, max(medians_s.values())) for name in parameters}


def _device(parameters: dict[str, nn.Parameter]) -> torch.device:
    return next(iter(parameters.values())).device


def _forward_shares_s(needed_s: dict[str, float], forward_s: float) -> dict[str, float]:
    """From when a tensor is needed until the next one is; the first takes what comes before it."""
    in_order = sorted(needed_s, key=lambda name: needed_s[name])
    begins_s = [0.0, *(needed_s[name] for name in in_order[1:]), forward_s]
    return {
        name: max(0.0, end - begin)
        for name, begin, end in zip(in_order, begins_s, begins_s[1:], strict=False)
    }

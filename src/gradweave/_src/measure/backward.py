"""Recording a Trace from real iterations: when gradients are ready, how long forward takes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import unserializable_hook

from gradweave._src.clocks import Clock, clock_for, have_passed
from gradweave._src.comm.small_messages import first_to_say, gather_long_text
from gradweave._src.errors import RequestError
from gradweave._src.torch_internals import all_requiring_grad, remove_gradient_hook
from gradweave._src.trace import Tensor, Trace


class Spread(NamedTuple):
    """The times between which half of the iterations lie.

    Attributes:
        low_s: seconds; a quarter of the iterations took less.
        high_s: seconds; a quarter of the iterations took more.
    """

    low_s: float
    high_s: float


class Recording(Struct, frozen=True, kw_only=True):
    """What ``record_trace`` returns: a trace, and what was not the same in every iteration.

    Attributes:
        trace: what was recorded.
        iterations: how many were counted.
        forward: how far this rank's forward passes lie apart.
        backward: how far its backward passes lie apart.
        reordered: iterations in which gradients came in another order than in the first.
        without_gradient: parameters that lacked their gradient, and in how many iterations.
    """

    trace: Trace
    iterations: int
    forward: Spread
    backward: Spread
    reordered: int
    without_gradient: dict[str, int]


def record_trace(
    model: nn.Module,
    step: Callable[[], object],
    *,
    name: str,
    batch_size: int,
    warmup: int = 3,
    iterations: int = 10,
    group: dist.ProcessGroup | None = None,
) -> Recording:
    """Run ``step``, which calls the model and backward, and note when each gradient is ready.

    Times are medians over the iterations after the warm-up; with a ``group`` those of the slowest
    rank. A gradient is ready when backward has accumulated it for the last time. A tensor's share
    of forward begins when the module that owns it is called, and ends when the next tensor's
    begins. What follows the model's forward, such as the loss, counts as the beginning of backward.

    Args:
        model: the model that ``step`` calls.
        step: runs forward and backward once.
        name: what the trace is to be called.
        batch_size: how many samples a step has, for samples per second.
        warmup: how many iterations are not counted.
        iterations: how many are.
        group: the ranks that record together, each of which calls this.

    Raises:
        RequestError: if no parameter requires a gradient, or ``step`` does not call the model or
            gives no parameter its gradient.

    Examples:
        >>> def step():
        ...     model(batch).sum().backward()
        >>> recording = gradweave.record_trace(model, step, name="mine", batch_size=len(batch))
        >>> len(recording.trace.tensors)
        4
    """
    return record_by_clock(
        model,
        step,
        name=name,
        batch_size=batch_size,
        warmup=warmup,
        iterations=iterations,
        group=group,
    )


def record_by_clock(
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
    """Do what ``record_trace`` does by any clock (default: the clock of the model's device)."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise RequestError("the model has no parameters that require a gradient")
    seen = []
    with observing(model, parameters, clock) as observer:
        for number in range(warmup + iterations):
            observer.begin()
            step()
            if number >= warmup:
                seen.append(_seen(observer))
    observed = []
    for marks in seen:
        marks.wait()
        observed.append(marks.iteration())
    return _recording(observed, parameters, name=name, batch_size=batch_size, group=group)


def _seen(observer: "Observer") -> "Marks":
    marks = observer.marks()
    if marks is None:
        raise RequestError("step() did not call the model; it must run forward and backward")
    return marks


class Iteration(Struct, frozen=True, kw_only=True):
    """One iteration in seconds: since forward began, and since it ended."""

    forward_s: float
    needed_s: dict[str, float]
    ready_s: dict[str, float]  # in the order in which they came


class Marks(NamedTuple):
    """One iteration as it was marked; times are asked for when all marks have passed."""

    clock: Clock
    parameters: Iterable[str]
    began: object
    ended: object
    called: dict[str, object]
    ready: dict[str, object]  # in the order in which gradients came

    def have_passed(self) -> bool:
        """Return whether ``iteration`` can be asked for; never wait."""
        return have_passed(self.clock, self._last)

    def wait(self) -> None:
        for mark in self._last:
            self.clock.wait_until(mark)

    @property
    def _last(self) -> list[object]:
        """All marks, because gradients may come on other streams than the model's."""
        return [self.began, self.ended, *self.called.values(), *self.ready.values()]

    def iteration(self) -> Iteration:
        seconds, began = self.clock.seconds, self.began
        return Iteration(
            forward_s=seconds(began, self.ended),
            needed_s={
                name: seconds(began, self.called.get(_owner(name, self.called), began))
                for name in self.parameters
            },
            ready_s={
                name: max(0.0, seconds(self.ended, mark)) for name, mark in self.ready.items()
            },
        )


class Observer:
    """Marks of one iteration, set by hooks; ``begin`` forgets those of the one before."""

    def __init__(
        self,
        clock: Clock,
        parameters: dict[str, nn.Parameter],
        *,
        on_last: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._parameters, self._on_last = clock, parameters, on_last
        self.begin()

    def begin(self) -> None:
        self._began: object | None = None
        self._ended: object | None = None
        self._called: dict[str, object] = {}
        self._ready: dict[str, object] = {}

    def before_module(self, name: str) -> None:
        mark = self._clock.mark()
        self._called.setdefault(name, mark)
        if self._began is None:
            self._began = mark

    def after_model(self) -> None:
        if self._ended is None:
            self._ended = self._clock.mark()

    def gradient(self, name: str) -> None:
        mark = self._clock.mark()
        if self._ended is None:  # backward runs inside of forward
            self._ended = mark
        self._ready.pop(name, None)  # the last accumulation counts, for the order as well
        self._ready[name] = mark
        if len(self._ready) == len(self._parameters):
            self._on_last()

    def marks(self) -> Marks | None:
        """Return the marks since ``begin``; None where the model was not called."""
        if self._began is None or self._ended is None:
            return None
        return Marks(
            self._clock, self._parameters, self._began, self._ended, self._called, self._ready
        )


def _owner(parameter: str, called: dict[str, object]) -> str:
    """Return the innermost module around a parameter that was called; its own may not have been."""
    owner = parameter
    while owner:
        owner = owner.rpartition(".")[0]
        if owner in called:
            break
    return owner


@contextmanager
def observing(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    clock: Clock | None = None,
    *,
    on_last: Callable[[], None] = lambda: None,
) -> Iterator[Observer]:
    """Have an observer see calls of modules, and gradients, for the length of a block.

    ``on_last`` is called when every parameter has got a gradient. Nothing of ours is on the modules
    meanwhile: they may be scripted, copied or pickled.
    """
    observer = Observer(clock or clock_for(_device(parameters)), parameters, on_last=on_last)
    # Modules are held weakly, and the model not at all: one may know the wrapper that observes it.
    names = WeakKeyDictionary({module: name for name, module in model.named_modules()})
    del model

    def before(module: nn.Module, inputs: object) -> None:
        del inputs
        if (name := names.get(module)) is not None:
            observer.before_module(name)

    def after(module: nn.Module, inputs: object, output: object) -> None:
        del inputs, output
        if names.get(module) == "":
            observer.after_model()

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    on_gradients = []
    with all_requiring_grad(parameters.values()):
        for name, parameter in parameters.items():
            note = unserializable_hook(lambda _, name=name: observer.gradient(name))  # type: ignore[no-untyped-call]
            on_gradients.append((parameter, parameter.register_hook(note)))  # type: ignore[no-untyped-call]
    try:
        yield observer
    finally:
        for handle in handles:
            handle.remove()
        for parameter, handle in on_gradients:
            remove_gradient_hook(parameter, handle)


class RankTimes(Struct, frozen=True, kw_only=True):
    """Medians over one rank's iterations, by parameter.

    Parameters that lack a gradient are as late as the last.
    """

    forward_s: float
    needed_s: dict[str, float]
    ready_s: dict[str, float]


def rank_times(observed: list[Iteration], parameters: Iterable[str]) -> RankTimes:
    """Return medians over iterations; raise RequestError where no parameter has got a gradient."""
    names = list(parameters)
    if not any(one.ready_s for one in observed):
        raise RequestError("no parameter got a gradient; step() must call backward")
    return RankTimes(
        forward_s=median(one.forward_s for one in observed),
        needed_s={name: median(one.needed_s[name] for one in observed) for name in names},
        ready_s=_median_ready_s(observed, names),
    )


def _times_of_all(
    observed: list[Iteration], parameters: Iterable[str], group: dist.ProcessGroup
) -> RankTimes:
    """Return the slowest rank's times; where a rank has none, all ranks raise what it says."""
    text = why = ""
    try:
        text = msgspec.json.encode(rank_times(observed, parameters)).decode()
    except RequestError as error:
        why = str(error)
    if said := first_to_say(group, why):
        raise RequestError(said)
    everyone = gather_long_text(group, text)
    return slowest_rank([msgspec.json.decode(one, type=RankTimes) for one in everyone])


def slowest_rank(ranks: list[RankTimes]) -> RankTimes:
    """Return each moment as it was on the rank where it came last."""
    first = ranks[0]
    return RankTimes(
        forward_s=max(rank.forward_s for rank in ranks),
        needed_s={name: max(rank.needed_s[name] for rank in ranks) for name in first.needed_s},
        ready_s={name: max(rank.ready_s[name] for rank in ranks) for name in first.ready_s},
    )


def trace_of(
    times: RankTimes,
    parameters: dict[str, nn.Parameter],
    *,
    name: str,
    batch_size: int,
    iterations: int,
) -> Trace:
    """Return the trace, in the order in which gradients are ready, without empty parameters."""
    shares_s = _forward_shares_s(times.needed_s, times.forward_s)
    # Of gradients that come at once, the one declared last comes first, as it does in backward.
    declared = {name: place for place, name in enumerate(parameters)}
    order = sorted(parameters, key=lambda name: (times.ready_s[name], -declared[name]))
    return Trace(
        name=name,
        batch_size=batch_size,
        origin="measured",
        source=f"recorded on {_device(parameters).type}, torch {torch.__version__}, "
        f"median of {iterations} iterations",
        tensors=tuple(
            Tensor(
                name=name,
                elements=parameters[name].numel(),
                bytes_per_element=parameters[name].element_size(),
                ready_s=times.ready_s[name],
                forward_s=shares_s[name],
                shape=tuple(parameters[name].shape),
            )
            for name in order
            if parameters[name].numel()
        ),
    )


def _recording(
    observed: list[Iteration],
    parameters: dict[str, nn.Parameter],
    *,
    name: str,
    batch_size: int,
    group: dist.ProcessGroup | None,
) -> Recording:
    if group is None:
        times = rank_times(observed, parameters)
    else:
        times = _times_of_all(observed, parameters, group)
    orders = [tuple(one.ready_s) for one in observed]
    return Recording(
        trace=trace_of(
            times, parameters, name=name, batch_size=batch_size, iterations=len(observed)
        ),
        iterations=len(observed),
        forward=_spread([one.forward_s for one in observed]),
        backward=_spread([max(one.ready_s.values(), default=0.0) for one in observed]),
        reordered=sum(order != orders[0] for order in orders),
        without_gradient={
            name: missing
            for name in parameters
            if (missing := sum(name not in one.ready_s for one in observed))
        },
    )


def _spread(times_s: list[float]) -> Spread:
    if len(times_s) == 1:
        return Spread(times_s[0], times_s[0])
    low_s, _, high_s = quantiles(times_s, n=4, method="inclusive")
    return Spread(low_s, high_s)


def _median_ready_s(observed: list[Iteration], names: list[str]) -> dict[str, float]:
    """Return the median time of each gradient; one that never came is as late as the last."""
    times_s = {
        name: [one.ready_s[name] for one in observed if name in one.ready_s] for name in names
    }
    medians_s = {name: median(times) for name, times in times_s.items() if times}
    return {name: medians_s.get(name, max(medians_s.values())) for name in names}


def _device(parameters: dict[str, nn.Parameter]) -> torch.device:
    return next(iter(parameters.values())).device


def _forward_shares_s(needed_s: dict[str, float], forward_s: float) -> dict[str, float]:
    """Return the time from when each tensor is needed until the next is; the first begins at 0."""
    in_order = sorted(needed_s, key=lambda name: needed_s[name])
    begins_s = [0.0, *(needed_s[name] for name in in_order[1:]), forward_s]
    return {
        name: max(0.0, end - begin)
        for name, begin, end in zip(in_order, begins_s, begins_s[1:], strict=False)
    }

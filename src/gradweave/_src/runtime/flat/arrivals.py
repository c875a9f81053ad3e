"""Receiving parameters while forward goes on: a module waits for those that it is about to read."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.overrides import TorchFunctionMode

from gradweave._src.runtime.wrapping.inputs import tensors_in


class Awaited(Protocol):
    """Something that is on its way."""

    def wait(self) -> object:
        """Return when it is there, or raise."""


class Arrivals:
    """Knows which parameters are on their way, and has modules wait for theirs.

    A parameter is waited for by every module that owns it when that module is called. Some modules
    read parameters of others without calling them (attention that reads its output projection): the
    first forward pass notes who reads what, and the module called last before a reading waits too.
    What nobody was seen to read is waited for when the model is called. ``waits`` is given what
    waits, and calls it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        *,
        waits: Callable[[Callable[[], None]], None] = lambda wait: wait(),
    ) -> None:
        self._waits = waits
        # Weakly: a module may know its wrapper, whose end this waits for.
        self._model = weakref.ref(model)
        self._expected: dict[nn.Parameter, Awaited] = {}
        self._all = set(parameters)
        self._read_by = WeakKeyDictionary(
            {
                module: self._all.intersection(module.parameters(recurse=False))
                for module in model.modules()
            }
        )
        self._was_noted = False
        self._called: list[nn.Module] | None = None  # while readings are noted
        before = _BeforeModule(self._before)
        self._handles = [module.register_forward_pre_hook(before) for module in model.modules()]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def expect(self, parameters: Iterable[nn.Parameter], awaited: Awaited) -> None:
        """Let nobody read these parameters before what is awaited is there."""
        self._expected.update(dict.fromkeys(parameters, awaited))

    def wait_for_all(self) -> None:
        self._wait_for(list(self._expected))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note who reads what in a forward pass; only the first one is looked at."""
        if self._was_noted:
            yield
            return
        called = self._called = []
        try:
            with _Readings(self._note):
                yield
        finally:
            self._called = None
        seen = set().union(*(self._read_by[module] for module in called))
        model = self._model()
        assert model is not None, "it has just been called"
        self._read_by[model] |= self._all - seen
        self._was_noted = True

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter in self._all and self._called:
            self._read_by[self._called[-1]].add(parameter)

    def _before(self, module: nn.Module, inputs: object) -> None:
        del inputs
        if self._expected:
            self._wait_for(self._read_by[module])
        if self._called is not None:
            self._called.append(module)

    def _wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        expected = [parameter for parameter in parameters if parameter in self._expected]
        if not expected:
            return
        self._waits(lambda: _wait_for_each(self._expected[parameter] for parameter in expected))
        for parameter in expected:  # not before: what has failed has not arrived
            del self._expected[parameter]


def _wait_for_each(several: Iterable[Awaited]) -> None:
    for awaited in dict.fromkeys(several):
        awaited.wait()


class _BeforeModule:
    """The hook that modules have. A copy of a module waits for nobody, and a file of one loads
    where this package is not installed: both get a function that takes anything and does nothing.
    """

    def __init__(self, call: Callable[[nn.Module, object], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self._call(module, inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _Readings(TorchFunctionMode):
    """Sees the parameters that torch's functions are called with."""

    def __init__(self, note: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        for tensor in tensors_in((args, kwargs or {})):
            if isinstance(tensor, nn.Parameter):
                self._note(tensor)
        return func(*args, **(kwargs or {}))

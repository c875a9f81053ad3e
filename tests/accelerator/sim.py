"""The simulated accelerator: to import it registers device ``sim`` and backend ``simccl``.

Afterwards ``torch.sim`` is this module, tensors live on ``sim:0``, ``sim:1``, …, and
``torch.accelerator`` means them. README.md in this folder says what is simulated and how.
"""

import atexit
import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerator import building

_device = building.load()

# --- What tests ask of the device ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """One kernel's use of memory; streams are numbered over all devices."""

    op: str
    device: int
    stream: int
    number: int  # of the kernel on its stream

    def __str__(self) -> str:
        return f"{self.op} (kernel {self.number} of stream {self.stream} on sim:{self.device})"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two uses of the same bytes whose order nothing ensures."""

    kind: str
    first: Use
    second: Use
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes {self.kind}: {self.second} after {self.first}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """When a kernel really ran, on the clock of ``time.monotonic_ns``."""

    op: str
    device: int
    stream: int
    number: int
    delay_ns: int  # as it was drawn
    launched_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a collective on the host; coalesced ones are one launch."""

    device: int
    communicator: str
    what: str  # the operation and its sizes
    thread: int  # of the host that launched it


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened since the last reset."""

    launches: Counter[str]  # by operator
    host_waits: Counter[str]  # by what the host waited for
    bytes_to_device: int
    bytes_to_host: int
    bytes_on_device: int

    @property
    def host_wait_count(self) -> int:
        return self.host_waits.total()


def hazards(*, strict: bool = False) -> list[str]:
    """Every hazard found so far, in words.

    With ``strict``, threads of the host are believed to know only what they have waited for
    themselves. That finds more, and also what is right because threads told each other.
    """
    found = [
        str(Hazard(each["kind"], Use(**each["first"]), Use(**each["second"]), each["nbytes"]))
        for each in _device.hazards()
        if strict or not each["only_between_threads"]
    ]
    return found + list(_device.launch_hazards())


def errors() -> list[str]:
    """What kernels raised on their streams; the host's next wait raises the first of them."""
    return list(_device.errors())


def counters() -> Counts:
    counted = _device.counters()
    return Counts(
        launches=Counter(counted["launches"]),
        host_waits=Counter(counted["host_waits"]),
        bytes_to_device=counted["bytes_to_device"],
        bytes_to_host=counted["bytes_to_host"],
        bytes_on_device=counted["bytes_on_device"],
    )


def launches() -> list[Launch]:
    """Collectives in the order in which the host launched them."""
    return [Launch(*each) for each in _device.launches()]


def kernels() -> list[Kernel]:
    """Kernels in the order in which they ended, if ``keep_kernels`` was on when they did."""
    return [Kernel(*each) for each in _device.kernels()]


def keep_kernels(*, keep: bool = True) -> None:
    _device.keep_kernels(keep)


def set_delays(
    mean_s: float, *, jitter: float = 0.9, seed: int = 0, launch_most_s: float = 0.0
) -> None:
    """Let each kernel launched from now on last ``mean_s``, give or take a random share of it.

    The host takes a random time of up to ``launch_most_s`` before it launches a collective.
    """
    _device.set_delays(round(mean_s * 1e9), jitter, seed)
    _device.set_launch_delay(round(launch_most_s * 1e9))


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Let the (current) stream run nothing that is queued from now on until this is left.

    So a test can be sure that the host is ahead, however slow the machine. Whoever waits for the
    stream inside waits for ever.
    """
    gate = _device.Gate(stream_number(stream or current_stream()))
    try:
        yield
    finally:
        gate.open()


def reset() -> None:
    """Forget hazards, errors, counts and kernels; delays stay."""
    _device.reset()
    _device.forget_launches()


def trace_host_waits(*, trace: bool = True) -> None:
    """Keep the stack of every wait of the host, for ``host_wait_stacks``."""
    _device.describe_callers((lambda: "".join(traceback.format_stack()[:-1])) if trace else None)


def host_wait_stacks() -> list[tuple[str, str]]:
    """What the host waited for, and from where."""
    return list(_device.host_wait_stacks())


def check_launches(*, check: bool = True) -> None:
    """Compare, with each collective, what ranks have launched before it (on by default)."""
    _device.check_launches(check)


def stream_number(stream: torch.Stream) -> int:
    """The number by which hazards and kernels name a stream."""
    return _device.stream_number(stream.device_index, stream.stream_id)


# --- What torch asks of a device's module ----------------------------------------------------


def device_count() -> int:
    return _device.device_count()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return _device.is_forked()


def current_device() -> int:
    return _device.current_device()


def set_device(device: Any) -> None:
    _device.set_device(_index(device))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


@contextlib.contextmanager
def device(which: Any) -> Iterator[None]:
    before = current_device()
    set_device(which)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(which: torch.Stream | None) -> Iterator[None]:
    if which is None:
        yield
        return
    with which:
        yield


Stream = torch.Stream
Event = torch.Event


def manual_seed(seed: int) -> None:
    _default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _default_generator(current_device()).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _default_generator(_index(device)).set_state(new_state)


def _default_generator(index: int) -> torch.Generator:
    return _device.default_generator(index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def memory_allocated(device: Any = None) -> int:
    return _device.memory_use(_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    return _device.memory_use(_index(device))[1]


def memory_reserved(device: Any = None) -> int:
    return _device.memory_use(_index(device))[2]


def reset_peak_memory_stats(device: Any = None) -> None:
    _device.reset_most_allocated(_index(device))


def empty_cache() -> None:
    """Memory stays with the allocator: who uses it too late must not end the process."""


# --- Process groups --------------------------------------------------------------------------


def communicator(
    store: dist.Store, rank: int, world: int, *, name: str, timeout: timedelta
) -> dist.Backend:
    """A backend like NCCL's, for tensors of sim devices; gloo carries its messages."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, world, timeout)
    return _device.Communicator(gloo, name, timeout.total_seconds())


def _backend(options: Any, _: Any) -> dist.Backend:
    return communicator(
        options.store,
        options.group_rank,
        options.group_size,
        name=options.group_id,
        timeout=options.timeout,
    )


def _register() -> None:
    torch.set_num_threads(1)  # streams are threads enough, and sums do not depend on how many
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _backend, extended_api=True, devices=["sim"])
    atexit.register(_device.shut_down)


_register()

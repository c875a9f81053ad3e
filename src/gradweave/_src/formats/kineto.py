"""A torch.profiler trace becomes a Trace: ready times, from the events of one step of one rank.

torch.profiler writes what Kineto, its library, has collected, as events for Chrome's viewer. What
is read of them, and what has to be assumed, is in docs/measuring.md ("Imported profiles").
"""

import gzip
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from gradweave._src.errors import FormatError, RequestError
from gradweave._src.trace import Tensor, Trace
from gradweave._src.vocabulary import printable, quoted

SCHEMA_VERSION = 1
GZIP_MAGIC = b"\x1f\x8b"
# A trace of a few steps has some hundred megabytes; a file of ten bytes can become any number.
MOST_BYTES = 8 << 30
LONGEST_COMPLAINT = 300
MOST_ELEMENTS = 1 << 48

STEP = re.compile(r"ProfilerStep#([0-9]{1,12})")
FORWARD = "DistributedDataParallel.forward"
AUTOGRAD = "autograd::engine::evaluate_function: "
ACCUMULATED = "torch::autograd::AccumulateGrad"
# An all-reduce, as it is handed over, and as NCCL notes it, with its size, in the same moment.
HANDED_OVER, NOTED_BY_NCCL = "c10d::allreduce_", "record_param_comms"
OF_NCCL = "nccl"  # its kernels move gradients and compute nothing

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHING = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"})

# As record_shapes and as NCCL's events name them.
BYTES_PER_ELEMENT: Mapping[str, int] = {
    "float": 4,
    "Float": 4,
    "double": 8,
    "Double": 8,
    "c10::Half": 2,
    "Half": 2,
    "c10::BFloat16": 2,
    "BFloat16": 2,
}
MICROSECONDS = 1e-6


class Event(Struct, frozen=True):
    """What lasted from ``ts`` for ``dur`` microseconds, on a thread of the host or on a device."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.ts + self.dur

    def begins_within(self, other: "Event") -> bool:
        return other.ts <= self.ts <= other.end


class _Profile(Struct, frozen=True):
    """The fields of a profile's file that are read here; it has others."""

    traceEvents: list[Event]  # noqa: N815
    schemaVersion: int | None = None  # noqa: N815


class Imported(Struct, frozen=True, kw_only=True):
    """A trace, the step it was taken from, and what is to be known of it besides."""

    trace: Trace
    step: int
    steps: tuple[int, ...]  # that the file has
    all_reduces: int
    on_device: bool
    note: str | None


def import_profile(
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    step: int | None = None,
    name: str | None = None,
) -> Imported:
    """Read a profile of one rank under torch's DistributedDataParallel, also gzipped.

    ``step`` is one of its ``ProfilerStep#N`` (default: the last). Raise FormatError where the file
    is not such a profile, or does not say what a trace needs.
    """
    origin = printable(str(path))
    events = _events(_content(Path(path), origin), origin)
    steps = _steps(events, origin)
    number = max(steps) if step is None else step
    if number not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise RequestError(f"{origin} has no step {number}; it has {printable(known)}")
    return _Step(events, steps[number], number, origin).imported(
        name=name or Path(path).name.removesuffix(".gz").removesuffix(".json"),
        batch_size=batch_size,
        steps=tuple(sorted(steps)),
    )


def _content(path: Path, origin: str) -> bytes:
    content = path.read_bytes()
    if not content.startswith(GZIP_MAGIC):
        return content
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        said = printable(str(error), most=LONGEST_COMPLAINT)
        raise FormatError(f"{origin}: not complete gzip ({said}); is it truncated?") from None
    if len(content) > MOST_BYTES:
        raise FormatError(f"{origin}: unpacked it has more than {MOST_BYTES >> 30} GiB")
    return content


def _events(content: bytes, origin: str) -> list[Event]:
    try:
        profile = msgspec.json.decode(content, type=_Profile)
    except msgspec.ValidationError as error:
        said = printable(str(error), most=LONGEST_COMPLAINT)
        raise FormatError(f"{origin}: not a torch.profiler trace ({said})") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        said = printable(str(error), most=LONGEST_COMPLAINT)
        raise FormatError(f"{origin}: not complete JSON ({said}); is the file truncated?") from None
    if profile.schemaVersion != SCHEMA_VERSION:
        raise FormatError(
            f"{origin}: schemaVersion: expected {SCHEMA_VERSION}, found "
            f"{quoted(profile.schemaVersion)}; export it with torch.profiler's "
            "export_chrome_trace"
        )
    return [event for event in profile.traceEvents if event.ph == "X" and event.dur >= 0]


def _steps(events: Iterable[Event], origin: str) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for event in events:
        named = STEP.fullmatch(event.name)
        if named is None or event.cat != "user_annotation":
            continue
        number = int(named[1])
        if number in found:
            raise FormatError(
                f"{origin}: ProfilerStep#{number} stands twice; import the profile of one rank"
            )
        found[number] = event
    if not found:
        raise FormatError(
            f"{origin} has no ProfilerStep#N; call the profiler's step() after each iteration"
        )
    return found


class _Gradient(Struct, frozen=True, kw_only=True):
    """A gradient, or a message where nothing is known of what it was merged from."""

    ready: float  # microseconds
    elements: int
    bytes_per_element: int
    shape: tuple[int, ...] | None


class _Step:
    """The events of one step; moments are microseconds, as in the file."""

    def __init__(self, events: Sequence[Event], step: Event, number: int, origin: str) -> None:
        self._number, self._origin = number, origin
        self._step = step
        within = [event for event in events if event.begins_within(step)]
        self._on_host = sorted(
            (event for event in within if event.cat not in ON_DEVICE | LAUNCHING),
            key=lambda event: event.ts,
        )
        self._kernels = self._launched(events, within)
        self._done_at = _end_of_launched(self._kernels)

    def imported(self, *, name: str, batch_size: int, steps: tuple[int, ...]) -> Imported:
        passes = [e for e in self._on_host if e.name.startswith(AUTOGRAD)]
        if not passes:
            raise self._error("has no backward pass; profile training, with CPU activities")
        forwards = [e for e in self._on_host if e.name == FORWARD]
        if len(forwards) > 1:
            raise self._error(
                f"has {len(forwards)} forward passes; profile steps that do not accumulate "
                "gradients"
            )
        all_reduces = self._all_reduces(passes)
        handed_over = sum(event.name == HANDED_OVER for event in all_reduces)
        messages = handed_over or len(all_reduces)
        gradients, note = self._gradients(all_reduces, messages)
        forward = self._start_of_forward(forwards, passes[0])
        began = self._done_at(passes[0].ts)
        try:
            trace = Trace(
                name=name,
                origin="measured",
                source=f"imported from step {self._number} of a torch.profiler trace",
                batch_size=batch_size,
                tensors=_tensors(gradients, began, max(0.0, began - forward)),
            )
        except ValueError as error:
            raise self._error(f"makes no trace: {error}") from None
        return Imported(
            trace=trace,
            step=self._number,
            steps=steps,
            all_reduces=messages,
            on_device=bool(self._kernels),
            note=note,
        )

    def _error(self, what: str) -> FormatError:
        said = printable(what, most=LONGEST_COMPLAINT)
        return FormatError(f"{self._origin}: step {self._number} {said}")

    def _launched(
        self, events: Iterable[Event], within: Iterable[Event]
    ) -> list[tuple[Event, Event]]:
        """Return the step's calls with the kernels they launched, wherever those run, in order."""
        calls = {
            number: event
            for event in within
            if event.cat in LAUNCHING and (number := _correlation(event)) is not None
        }
        kernels = [event for event in events if event.cat in ON_DEVICE]
        pairs = [
            (calls[number], kernel)
            for kernel in kernels
            if (number := _correlation(kernel)) in calls and not _moves_gradients(kernel)
        ]
        if kernels and not pairs:
            raise self._error(
                "launches none of the kernels in the file; profile with CPU activities, too"
            )
        return sorted(pairs, key=lambda pair: pair[0].ts)

    def _start_of_forward(self, forwards: Sequence[Event], backward: Event) -> float:
        """Return when torch's wrapper is called, or the first operation that autograd notes."""
        noted = (
            event
            for event in self._on_host
            if "Sequence number" in event.args and event.ts < backward.ts
        )
        first = forwards[0] if forwards else next(noted, None)
        if first is None:
            raise self._error("has no forward pass before its backward pass")
        later = [kernel.ts for call, kernel in self._kernels if call.ts >= first.ts]
        return min(later, default=first.ts)

    def _all_reduces(self, passes: Sequence[Event]) -> list[Event]:
        """Return the all-reduces that torch's wrapper hands over while backward runs."""
        accumulating = (event for event in passes if event.name == AUTOGRAD + ACCUMULATED)
        began, ended = passes[0].ts, max((event.end for event in accumulating), default=0.0)
        during = [e for e in self._on_host if began <= e.ts <= ended and _is_all_reduce(e)]
        if not during:
            raise self._error(
                "hands over no all-reduce in its backward pass; profile several ranks under "
                "torch's DistributedDataParallel"
            )
        return during

    def _gradients(
        self, all_reduces: Sequence[Event], messages: int
    ) -> tuple[list[_Gradient], str | None]:
        """Return gradients and a note on them, or messages if the profile has no sizes."""
        accumulated = [event for event in self._on_host if event.name == ACCUMULATED]
        gradients = [self._gradient(event) for event in accumulated]
        if gradients and None not in gradients:
            sized = [one for one in gradients if one is not None]
            return sized, _compared(sum(one.elements for one in sized), all_reduces)
        noted = [self._message(event) for event in all_reduces if event.name == NOTED_BY_NCCL]
        if len(noted) == messages and None not in noted:
            return [one for one in noted if one is not None], (
                "the profile has no sizes of gradients (record_shapes=True), so the trace has its "
                f"{messages} messages in their place: a plan can merge them, and not divide them"
            )
        raise self._error("has no sizes of gradients; profile with record_shapes=True")

    def _gradient(self, event: Event) -> _Gradient | None:
        """Return a gradient from its event; None where its shape was not recorded."""
        shape, kind = _first(event.args.get("Input Dims")), _first(event.args.get("Input type"))
        if not _is_shape(shape) or not kind:
            return None
        return self._made(event.end, prod(shape), kind, tuple(shape))

    def _message(self, event: Event) -> _Gradient | None:
        elements = event.args.get("In msg nelems")
        if not isinstance(elements, int) or not 0 <= elements < MOST_ELEMENTS:
            return None
        return self._made(event.ts, elements, event.args.get("dtype"), None)

    def _made(
        self, moment: float, elements: int, kind: Any, shape: tuple[int, ...] | None
    ) -> _Gradient:
        if not isinstance(kind, str) or kind not in BYTES_PER_ELEMENT:
            raise self._error(f"has gradients of type {quoted(kind)}, which is none that is known")
        return _Gradient(
            ready=self._done_at(moment),
            elements=elements,
            bytes_per_element=BYTES_PER_ELEMENT[kind],
            shape=shape,
        )


def _compared(gradients: int, all_reduces: Sequence[Event]) -> str | None:
    """Say so where not as many elements were reduced as there are gradients; None otherwise."""
    shapes = [
        _first(_first(event.args.get("Input Dims")))
        for event in all_reduces
        if event.name == HANDED_OVER
    ]
    if not shapes or not all(map(_is_shape, shapes)):
        return None
    reduced = sum(map(prod, shapes))
    if reduced == gradients:
        return None
    return (
        f"all-reduces of backward have {reduced:,} elements, and gradients {gradients:,}; "
        "something else was reduced, too, or some gradients were not"
    )


def _tensors(gradients: Sequence[_Gradient], began: float, forward: float) -> tuple[Tensor, ...]:
    """Return the trace's tensors; a profile does not tell whose forward was, so it is spread."""
    sent = [one for one in gradients if one.elements]
    ready = list(accumulate((max(0.0, one.ready - began) for one in sent), max))
    shares = [after - before for before, after in pairwise([0.0, *ready])]
    total = sum(shares) or 1.0
    return tuple(
        Tensor(
            name=f"gradient {number}",
            elements=one.elements,
            bytes_per_element=one.bytes_per_element,
            ready_s=moment * MICROSECONDS,
            forward_s=forward * share / total * MICROSECONDS,
            shape=one.shape,
        )
        for number, (one, moment, share) in enumerate(zip(sent, ready, shares, strict=True), 1)
    )


def _end_of_launched(kernels: Sequence[tuple[Event, Event]]) -> Callable[[float], float]:
    """Return a function that tells when the device has done what was launched by a moment.

    Devices do what they are given in order, so this is when the last of it ends. Without kernels
    the host has computed it itself, and it is done at that moment.
    """
    if not kernels:
        return lambda moment: moment
    launched = [call.ts for call, _ in kernels]
    ends = list(accumulate((kernel.end for _, kernel in kernels), max))

    def done_at(moment: float) -> float:
        number = bisect_right(launched, moment)
        return ends[number - 1] if number else kernels[0][1].ts

    return done_at


def _correlation(event: Event) -> int | None:
    number = event.args.get("correlation")
    return number if isinstance(number, int) else None


def _moves_gradients(kernel: Event) -> bool:
    return kernel.name.lower().startswith(OF_NCCL) or "Collective name" in kernel.args


def _is_all_reduce(event: Event) -> bool:
    """Whether it is an all-reduce; NCCL's notes have the same name for all collectives."""
    is_noted = event.name == NOTED_BY_NCCL and event.args.get("Collective name") == "allreduce"
    return is_noted or event.name == HANDED_OVER


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _is_shape(value: Any) -> bool:
    """Whether a value is a possible shape of a tensor; that of a scalar is empty."""
    return (
        isinstance(value, list)
        and all(isinstance(size, int) and 0 <= size < MOST_ELEMENTS for size in value)
        and prod(value) < MOST_ELEMENTS
    )

"""What happened, or would happen, in one iteration: spans on lanes."""

from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from gradweave._src import notebook
from gradweave._src.checks import LARGEST, require_not_negative, require_one_of
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import count_text, time_text

Lane = Literal["forward", "backward", "communication"]
LANES: tuple[Lane, ...] = get_args(Lane)
Interval = tuple[float, float]


class Span(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One interval of a timeline: the forward or backward pass of a tensor, or one message.

    ``simulate`` and the wrappers' ``timeline()`` make them.

    Attributes:
        lane: "forward", "backward" or "communication".
        label: what it is called in charts and tables.
        start_s: its begin, in seconds since the forward pass began.
        end_s: its end, in the same seconds.
        tensors: the names of the tensors that it is about; empty where a whole pass is one span.
        nbytes: the bytes of the message; 0 for a pass.

    Raises:
        RequestError: if the end is before the start, or there is no such lane.

    Examples:
        >>> span = gradweave.Span(
        ...     lane="backward", label="fc", start_s=0.1, end_s=0.2, tensors=("fc.weight",)
        ... )
        >>> span.lane
        'backward'
    """

    lane: Lane
    label: str
    start_s: float
    end_s: float
    tensors: tuple[str, ...]
    nbytes: int = 0

    def __post_init__(self) -> None:
        # Nearly all are as they should be, and whoever simulates makes thousands of them.
        if self.lane in LANES and 0 <= self.start_s <= self.end_s <= LARGEST:
            return
        require_one_of(self, lane=LANES)
        require_not_negative(self, "start_s", "end_s")
        if self.end_s < self.start_s:
            raise RequestError(f"end_s must not be before start_s {self.start_s}, got {self.end_s}")


class Timeline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One iteration of one worker, predicted or measured alike.

    ``simulate`` predicts one, ``timeline()`` of a wrapper measures one. docs/measuring.md says what
    each of its numbers means.

    Attributes:
        spans: the intervals on its lanes, at least one.

    Raises:
        RequestError: if there is no span.

    Examples:
        >>> computing = gradweave.Span(
        ...     lane="backward", label="fc", start_s=0.0, end_s=0.2, tensors=("fc",)
        ... )
        >>> message = gradweave.Span(
        ...     lane="communication", label="1", start_s=0.1, end_s=0.5, tensors=("fc",)
        ... )
        >>> timeline = gradweave.Timeline(spans=(computing, message))
        >>> timeline.iteration_s, round(timeline.exposed_s, 3)
        (0.5, 0.3)
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.spans:
            raise RequestError("spans must not be empty")

    @property
    def iteration_s(self) -> float:
        """When the last span has ended."""
        return max(span.end_s for span in self.spans)

    @property
    def compute_s(self) -> float:
        """How long something was computed."""
        return length(self._computing())

    @property
    def communication_s(self) -> float:
        """How long at least one message was on its way."""
        return length(self._communicating())

    @property
    def exposed_s(self) -> float:
        """The communication during which nothing is computed: what the network costs."""
        both = length([*self._computing(), *self._communicating()])
        return both - self.compute_s

    @property
    def overlap(self) -> float:
        """The share of communication hidden behind computation; 1 where there is none to hide."""
        if self.communication_s == 0:
            return 1.0
        return max(0.0, 1.0 - self.exposed_s / self.communication_s)

    @property
    def efficiency(self) -> float:
        """The share of the time in which something is computed: speed-up divided by the workers."""
        return self.compute_s / self.iteration_s

    def speedup(self, workers: int) -> float:
        """Return samples per second against one worker alone, each with a batch of its own."""
        return workers * self.efficiency

    @property
    def summary(self) -> str:
        """What the timeline shows, in a few words."""
        sent = sum(span.lane == "communication" for span in self.spans)
        return (
            f"{time_text(self.iteration_s)}: {time_text(self.compute_s)} computing, "
            f"{time_text(self.exposed_s)} waiting for {count_text(sent, 'message')}"
        )

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each span, for a data frame."""
        return [
            {
                "lane": span.lane,
                "label": span.label,
                "start_s": span.start_s,
                "end_s": span.end_s,
                "nbytes": span.nbytes,
                "tensors": len(span.tensors),
            }
            for span in self.spans
        ]

    def __repr__(self) -> str:
        return f"Timeline({self.summary})"

    def _repr_html_(self) -> str:
        """Draw a chart of forward, backward and communication over time."""
        bars = [
            notebook.Bar(span.lane, span.label, span.start_s, span.end_s) for span in self.spans
        ]
        return notebook.chart(repr(self), LANES, bars)

    def _computing(self) -> list[Interval]:
        return [(s.start_s, s.end_s) for s in self.spans if s.lane != "communication"]

    def _communicating(self) -> list[Interval]:
        return [(s.start_s, s.end_s) for s in self.spans if s.lane == "communication"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return how long they are together, where they overlap once."""
    return sum(end - start for start, end in _union(intervals))
